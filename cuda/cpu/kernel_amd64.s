//go:build amd64 && !purego

#include "textflag.h"

// The kernels never depend on alignment: loads are unaligned, and what is
// left of a row beyond a multiple of 8 is loaded through a mask, as zeros.
// tails<>+32-4n holds n ones followed by zeros.
DATA tails<>+0(SB)/8, $-1
DATA tails<>+8(SB)/8, $-1
DATA tails<>+16(SB)/8, $-1
DATA tails<>+24(SB)/8, $-1
DATA tails<>+32(SB)/8, $0
DATA tails<>+40(SB)/8, $0
DATA tails<>+48(SB)/8, $0
DATA tails<>+56(SB)/8, $0
GLOBL tails<>(SB), RODATA|NOPTR, $64

// MASK sets Y to all ones in its first n lanes; n (0..7) is used up.
#define MASK(n, base, Y) \
	LEAQ tails<>+32(SB), base \
	SHLQ $2, n                \
	SUBQ n, base              \
	VMOVUPS (base), Y

// ROW multiplies eight values of one row of a with three rows of w.
#define ROW(a, s0, s1, s2) \
	VMOVUPS     (a)(AX*1), Y15 \
	VFMADD231PS Y12, Y15, s0   \
	VFMADD231PS Y13, Y15, s1   \
	VFMADD231PS Y14, Y15, s2

// TAIL multiplies the masked rest of one row of w (Y12) with four rows of a.
#define TAIL(s0, s1, s2, s3) \
	VMASKMOVPS  (R8)(AX*1), Y15, Y14  \
	VFMADD231PS Y12, Y14, s0          \
	VMASKMOVPS  (R9)(AX*1), Y15, Y14  \
	VFMADD231PS Y12, Y14, s1          \
	VMASKMOVPS  (R10)(AX*1), Y15, Y14 \
	VFMADD231PS Y12, Y14, s2          \
	VMASKMOVPS  (R11)(AX*1), Y15, Y14 \
	VFMADD231PS Y12, Y14, s3

// SUM3 leaves the sums of three vectors in the low lanes of x0, all three by
// the same tree.
#define SUM3(s0, s1, s2, x0) \
	VHADDPS      s1, s0, s0   \
	VHADDPS      s2, s2, s2   \
	VHADDPS      s2, s0, s0   \
	VEXTRACTF128 $1, s0, X12  \
	VADDPS       X12, x0, x0

// func dots(out *float32, stride int, a *[4]*float32, w *float32, ldw, tiles, body, rest int)
TEXT ·dots(SB), NOSPLIT, $0-64
	MOVQ out+0(FP), DI
	MOVQ stride+8(FP), BX
	MOVQ a+16(FP), AX
	MOVQ 0(AX), R8
	MOVQ 8(AX), R9
	MOVQ 16(AX), R10
	MOVQ 24(AX), R11
	MOVQ w+24(FP), DX
	MOVQ ldw+32(FP), SI

tile:
	LEAQ   (DX)(SI*1), R12
	LEAQ   (DX)(SI*2), R13
	MOVQ   body+48(FP), CX
	VXORPS Y0, Y0, Y0
	VXORPS Y1, Y1, Y1
	VXORPS Y2, Y2, Y2
	VXORPS Y3, Y3, Y3
	VXORPS Y4, Y4, Y4
	VXORPS Y5, Y5, Y5
	VXORPS Y6, Y6, Y6
	VXORPS Y7, Y7, Y7
	VXORPS Y8, Y8, Y8
	VXORPS Y9, Y9, Y9
	VXORPS Y10, Y10, Y10
	VXORPS Y11, Y11, Y11
	XORQ   AX, AX
	CMPQ   AX, CX
	JGE    rest

body:
	VMOVUPS (DX)(AX*1), Y12
	VMOVUPS (R12)(AX*1), Y13
	VMOVUPS (R13)(AX*1), Y14
	ROW(R8, Y0, Y1, Y2)
	ROW(R9, Y3, Y4, Y5)
	ROW(R10, Y6, Y7, Y8)
	ROW(R11, Y9, Y10, Y11)
	ADDQ    $32, AX
	CMPQ    AX, CX
	JLT     body

rest:
	MOVQ  rest+56(FP), CX
	TESTQ CX, CX
	JZ    sum
	MASK(CX, BX, Y15)
	MOVQ  stride+8(FP), BX
	VMASKMOVPS (DX)(AX*1), Y15, Y12
	TAIL(Y0, Y3, Y6, Y9)
	VMASKMOVPS (R12)(AX*1), Y15, Y12
	TAIL(Y1, Y4, Y7, Y10)
	VMASKMOVPS (R13)(AX*1), Y15, Y12
	TAIL(Y2, Y5, Y8, Y11)

sum:
	SUM3(Y0, Y1, Y2, X0)
	SUM3(Y3, Y4, Y5, X3)
	SUM3(Y6, Y7, Y8, X6)
	SUM3(Y9, Y10, Y11, X9)
	LEAQ    (BX)(BX*2), CX
	VMOVUPS X0, (DI)
	VMOVUPS X3, (DI)(BX*1)
	VMOVUPS X6, (DI)(BX*2)
	VMOVUPS X9, (DI)(CX*1)
	ADDQ    $12, DI
	LEAQ    (R13)(SI*1), DX
	DECQ    tiles+40(FP)
	JNZ     tile
	VZEROUPPER
	RET

// func mix(o, w *float32, n int, v *float32, ldv, cols int)
TEXT ·mix(SB), NOSPLIT, $0-48
	MOVQ o+0(FP), DI
	MOVQ w+8(FP), SI
	MOVQ ldv+32(FP), BX
	MOVQ v+24(FP), R8
	MOVQ cols+40(FP), R9

wide:
	CMPQ R9, $64
	JLT  narrow
	MOVQ n+16(FP), CX
	MOVQ SI, R10
	MOVQ R8, DX
	VMOVUPS 0(DI), Y0
	VMOVUPS 32(DI), Y1
	VMOVUPS 64(DI), Y2
	VMOVUPS 96(DI), Y3
	VMOVUPS 128(DI), Y4
	VMOVUPS 160(DI), Y5
	VMOVUPS 192(DI), Y6
	VMOVUPS 224(DI), Y7

widekey:
	VBROADCASTSS (R10), Y15
	VFMADD231PS  0(DX), Y15, Y0
	VFMADD231PS  32(DX), Y15, Y1
	VFMADD231PS  64(DX), Y15, Y2
	VFMADD231PS  96(DX), Y15, Y3
	VFMADD231PS  128(DX), Y15, Y4
	VFMADD231PS  160(DX), Y15, Y5
	VFMADD231PS  192(DX), Y15, Y6
	VFMADD231PS  224(DX), Y15, Y7
	ADDQ         $4, R10
	ADDQ         BX, DX
	DECQ         CX
	JNZ          widekey
	VMOVUPS Y0, 0(DI)
	VMOVUPS Y1, 32(DI)
	VMOVUPS Y2, 64(DI)
	VMOVUPS Y3, 96(DI)
	VMOVUPS Y4, 128(DI)
	VMOVUPS Y5, 160(DI)
	VMOVUPS Y6, 192(DI)
	VMOVUPS Y7, 224(DI)
	ADDQ $256, DI
	ADDQ $256, R8
	SUBQ $64, R9
	JMP  wide

narrow:
	CMPQ R9, $8
	JLT  last
	MOVQ n+16(FP), CX
	MOVQ SI, R10
	MOVQ R8, DX
	VMOVUPS (DI), Y0

narrowkey:
	VBROADCASTSS (R10), Y15
	VFMADD231PS  (DX), Y15, Y0
	ADDQ         $4, R10
	ADDQ         BX, DX
	DECQ         CX
	JNZ          narrowkey
	VMOVUPS Y0, (DI)
	ADDQ $32, DI
	ADDQ $32, R8
	SUBQ $8, R9
	JMP  narrow

last:
	TESTQ R9, R9
	JZ    done
	MASK(R9, R11, Y14)
	MOVQ n+16(FP), CX
	VMASKMOVPS (DI), Y14, Y0

lastkey:
	VBROADCASTSS (SI), Y15
	VMASKMOVPS   (R8), Y14, Y1
	VFMADD231PS  Y1, Y15, Y0
	ADDQ         $4, SI
	ADDQ         BX, R8
	DECQ         CX
	JNZ          lastkey
	VMASKMOVPS Y0, Y14, (DI)

done:
	VZEROUPPER
	RET

DATA expconst<>+0(SB)/4, $0x3fb8aa3b  // 1/ln 2
DATA expconst<>+4(SB)/4, $0x4b400000  // 3·2^22: adding it drops the fraction
DATA expconst<>+8(SB)/4, $0x3f318000  // ln 2, high part
DATA expconst<>+12(SB)/4, $0xb95e8083 // ln 2, the rest
DATA expconst<>+16(SB)/4, $0xc2ae999a // -87.3
DATA expconst<>+20(SB)/4, $0x3f800000 // 1, and its exponent bits
DATA expconst<>+24(SB)/4, $0x3f000000 // polynomial, degree 2 first
DATA expconst<>+28(SB)/4, $0x3e2aaaaa
DATA expconst<>+32(SB)/4, $0x3d2aa9c1
DATA expconst<>+36(SB)/4, $0x3c088908
DATA expconst<>+40(SB)/4, $0x3ab743ce
DATA expconst<>+44(SB)/4, $0x39506967
GLOBL expconst<>(SB), RODATA|NOPTR, $48

// EXP replaces Y0 by e^(Y0-Y15), where that is at most 1 or so. Exponents
// below -87.3 give 0, NaN gives NaN. It uses Y1..Y4.
#define EXP \
	VSUBPS       Y15, Y0, Y0       \
	VCMPPS       $5, Y14, Y0, Y4   \
	VMOVAPS      Y13, Y1           \
	VFMADD231PS  Y12, Y0, Y1       \
	VSUBPS       Y13, Y1, Y2       \
	VFNMADD231PS Y11, Y2, Y0       \
	VFNMADD231PS Y10, Y2, Y0       \
	VPSLLD       $23, Y1, Y1       \
	VPADDD       Y9, Y1, Y1        \
	VBROADCASTSS expconst<>+44(SB), Y2 \
	VBROADCASTSS expconst<>+40(SB), Y3 \
	VFMADD213PS  Y3, Y0, Y2        \
	VBROADCASTSS expconst<>+36(SB), Y3 \
	VFMADD213PS  Y3, Y0, Y2        \
	VBROADCASTSS expconst<>+32(SB), Y3 \
	VFMADD213PS  Y3, Y0, Y2        \
	VBROADCASTSS expconst<>+28(SB), Y3 \
	VFMADD213PS  Y3, Y0, Y2        \
	VBROADCASTSS expconst<>+24(SB), Y3 \
	VFMADD213PS  Y3, Y0, Y2        \
	VMULPS       Y0, Y0, Y3        \
	VFMADD213PS  Y0, Y3, Y2        \
	VADDPS       Y9, Y2, Y2        \
	VMULPS       Y1, Y2, Y0        \
	VANDPS       Y4, Y0, Y0

// GATHER adds the eight values of Y0 to the float64 sums Y6 and Y7.
#define GATHER \
	VCVTPS2PD    X0, Y1      \
	VEXTRACTF128 $1, Y0, X2  \
	VCVTPS2PD    X2, Y2      \
	VADDPD       Y1, Y6, Y6  \
	VADDPD       Y2, Y7, Y7

// TOTAL leaves the sum of Y6 and Y7 in X6.
#define TOTAL \
	VADDPD       Y7, Y6, Y6  \
	VEXTRACTF128 $1, Y6, X7  \
	VADDPD       X7, X6, X6  \
	VHADDPD      X6, X6, X6

// func exps(dst, x *float32, n int, shift float32) float64
TEXT ·exps(SB), NOSPLIT, $0-40
	MOVQ         dst+0(FP), DI
	MOVQ         x+8(FP), SI
	MOVQ         n+16(FP), CX
	VBROADCASTSS shift+24(FP), Y15
	VBROADCASTSS expconst<>+16(SB), Y14
	VBROADCASTSS expconst<>+4(SB), Y13
	VBROADCASTSS expconst<>+0(SB), Y12
	VBROADCASTSS expconst<>+8(SB), Y11
	VBROADCASTSS expconst<>+12(SB), Y10
	VBROADCASTSS expconst<>+20(SB), Y9
	VXORPS       Y6, Y6, Y6
	VXORPS       Y7, Y7, Y7

expbody:
	CMPQ    CX, $8
	JLT     exprest
	VMOVUPS (SI), Y0
	EXP
	VMOVUPS Y0, (DI)
	GATHER
	ADDQ    $32, SI
	ADDQ    $32, DI
	SUBQ    $8, CX
	JMP     expbody

exprest:
	TESTQ CX, CX
	JZ    expdone
	MASK(CX, AX, Y8)
	VMASKMOVPS (SI), Y8, Y0
	EXP
	VANDPS     Y8, Y0, Y0
	VMASKMOVPS Y0, Y8, (DI)
	GATHER

expdone:
	TOTAL
	VMOVSD X6, ret+32(FP)
	VZEROUPPER
	RET

// func cross(p, x *float32, n int, shift float32) float64
TEXT ·cross(SB), NOSPLIT, $0-40
	MOVQ         p+0(FP), DI
	MOVQ         x+8(FP), SI
	MOVQ         n+16(FP), CX
	VBROADCASTSS shift+24(FP), Y15
	VXORPS       Y6, Y6, Y6
	VXORPS       Y7, Y7, Y7

crossbody:
	CMPQ    CX, $8
	JLT     crossrest
	VMOVUPS (SI), Y0
	VSUBPS  Y15, Y0, Y0
	VMULPS  (DI), Y0, Y0
	GATHER
	ADDQ    $32, SI
	ADDQ    $32, DI
	SUBQ    $8, CX
	JMP     crossbody

crossrest:
	TESTQ CX, CX
	JZ    crossdone
	MASK(CX, AX, Y8)
	VMASKMOVPS (SI), Y8, Y0
	VMASKMOVPS (DI), Y8, Y3
	VSUBPS     Y15, Y0, Y0
	VMULPS     Y3, Y0, Y0
	VANDPS     Y8, Y0, Y0
	GATHER

crossdone:
	TOTAL
	VMOVSD X6, ret+32(FP)
	VZEROUPPER
	RET

// func above(x *float32, n int, limit float32) int
TEXT ·above(SB), NOSPLIT, $0-32
	MOVQ         x+0(FP), SI
	MOVQ         n+8(FP), CX
	VBROADCASTSS limit+16(FP), Y15
	XORQ         AX, AX

abovebody:
	LEAQ     8(AX), DX
	CMPQ     DX, CX
	JGT      abovedone
	VMOVUPS  (SI)(AX*4), Y0
	VCMPPS   $30, Y15, Y0, Y0 // greater, false for NaN
	VMOVMSKPS Y0, BX
	TESTL    BX, BX
	JNZ      abovedone
	MOVQ     DX, AX
	JMP      abovebody

abovedone:
	MOVQ AX, ret+24(FP)
	VZEROUPPER
	RET

// func largest(x *float32, n int) float32
TEXT ·largest(SB), NOSPLIT, $0-20
	MOVQ         x+0(FP), SI
	MOVQ         n+8(FP), CX
	MOVL         $0xff800000, AX
	VMOVD        AX, X0
	VBROADCASTSS X0, Y0
	VMOVAPS      Y0, Y1

maxbody:
	CMPQ    CX, $16
	JLT     maxrest
	VMOVUPS (SI), Y2
	VMOVUPS 32(SI), Y3
	VMAXPS  Y0, Y2, Y0 // a NaN in Y2 gives Y0
	VMAXPS  Y1, Y3, Y1
	ADDQ    $64, SI
	SUBQ    $16, CX
	JMP     maxbody

maxrest:
	VMAXPS       Y1, Y0, Y0
	VEXTRACTF128 $1, Y0, X1
	VMAXPS       X1, X0, X0
	VPERMILPS    $0x4e, X0, X1
	VMAXPS       X1, X0, X0
	VPERMILPS    $0xb1, X0, X1
	VMAXPS       X1, X0, X0

maxlast:
	TESTQ  CX, CX
	JZ     maxdone
	VMOVSS (SI), X1
	VMAXSS X0, X1, X0
	ADDQ   $4, SI
	DECQ   CX
	JMP    maxlast

maxdone:
	VMOVSS X0, ret+16(FP)
	VZEROUPPER
	RET

// func count(x *float32, n int, limit float32) int
TEXT ·count(SB), NOSPLIT, $0-32
	MOVQ         x+0(FP), SI
	MOVQ         n+8(FP), CX
	VBROADCASTSS limit+16(FP), Y15
	VPXOR        Y1, Y1, Y1

countbody:
	CMPQ    CX, $8
	JLT     countdone
	VMOVUPS (SI), Y0
	VCMPPS  $30, Y15, Y0, Y0 // greater: -1 in the lane, 0 for NaN
	VPSUBD  Y0, Y1, Y1
	ADDQ    $32, SI
	SUBQ    $8, CX
	JMP     countbody

countdone:
	VEXTRACTI128 $1, Y1, X0
	VPADDD       X0, X1, X1
	VPHADDD      X1, X1, X1
	VPHADDD      X1, X1, X1
	VMOVD        X1, AX
	MOVQ         AX, ret+24(FP)
	VZEROUPPER
	RET

DATA logconst<>+0(SB)/4, $0x007fffff // mantissa
DATA logconst<>+4(SB)/4, $0x3f000000 // 1/2, and its exponent bits
DATA logconst<>+8(SB)/4, $0x0000007e // 126
DATA logconst<>+12(SB)/4, $0x3f3504f3 // sqrt(1/2)
DATA logconst<>+16(SB)/4, $0x3f800000 // 1
DATA logconst<>+20(SB)/4, $0xb95e8083 // ln 2 - high part
DATA logconst<>+24(SB)/4, $0x3f318000 // ln 2, high part
DATA logconst<>+28(SB)/4, $0x7fffffff // all but the sign
DATA logconst<>+32(SB)/4, $0x3d9021bb // polynomial, degree 8 first
DATA logconst<>+36(SB)/4, $0xbdebd1b8
DATA logconst<>+40(SB)/4, $0x3def251a
DATA logconst<>+44(SB)/4, $0xbdfe5d4f
DATA logconst<>+48(SB)/4, $0x3e11e9bf
DATA logconst<>+52(SB)/4, $0xbe2aae50
DATA logconst<>+56(SB)/4, $0x3e4cceac
DATA logconst<>+60(SB)/4, $0xbe7ffffc
DATA logconst<>+64(SB)/4, $0x3eaaaaaa
GLOBL logconst<>(SB), RODATA|NOPTR, $68

// APART leaves |p - q·scale| of p in Y3 and q in Y0 in Y0.
#define APART \
	VMULPS Y15, Y0, Y0 \
	VSUBPS Y0, Y3, Y0  \
	VANDPS Y14, Y0, Y0

// func apart(p, q *float32, n int, scale float32) float64
TEXT ·apart(SB), NOSPLIT, $0-40
	MOVQ         p+0(FP), DI
	MOVQ         q+8(FP), SI
	MOVQ         n+16(FP), CX
	VBROADCASTSS scale+24(FP), Y15
	VBROADCASTSS logconst<>+28(SB), Y14
	VXORPS       Y6, Y6, Y6
	VXORPS       Y7, Y7, Y7

apartbody:
	CMPQ    CX, $8
	JLT     apartrest
	VMOVUPS (SI), Y0
	VMOVUPS (DI), Y3
	APART
	GATHER
	ADDQ    $32, SI
	ADDQ    $32, DI
	SUBQ    $8, CX
	JMP     apartbody

apartrest:
	TESTQ CX, CX
	JZ    apartdone
	MASK(CX, AX, Y8)
	VMASKMOVPS (SI), Y8, Y0
	VMASKMOVPS (DI), Y8, Y3
	APART
	VANDPS     Y8, Y0, Y0
	GATHER

apartdone:
	TOTAL
	VMOVSD X6, ret+32(FP)
	VZEROUPPER
	RET

// STEP is one step of the polynomial in Y0 that Y3 holds.
#define STEP(at) \
	VBROADCASTSS logconst<>+at(SB), Y4 \
	VFMADD213PS  Y4, Y0, Y3

// MIXTURE leaves m·log m, m = (p + q·scale)/2, of p in Y3 and q in Y0 in Y0.
// m is 2^e times something in sqrt(1/2)..sqrt(2); m = 0 gives 0 times a
// finite number, NaN gives NaN.
#define MIXTURE \
	VFMADD213PS  Y3, Y15, Y0                \
	VBROADCASTSS logconst<>+4(SB), Y9       \
	VMULPS       Y9, Y0, Y5                 \
	VPSRLD       $23, Y5, Y1                \
	VBROADCASTSS logconst<>+8(SB), Y4       \
	VPSUBD       Y4, Y1, Y1                 \
	VCVTDQ2PS    Y1, Y1                     \
	VBROADCASTSS logconst<>+0(SB), Y4       \
	VANDPS       Y4, Y5, Y0                 \
	VORPS        Y9, Y0, Y0                 \
	VBROADCASTSS logconst<>+12(SB), Y4      \
	VCMPPS       $1, Y4, Y0, Y2             \
	VBROADCASTSS logconst<>+16(SB), Y10     \
	VANDPS       Y2, Y10, Y4                \
	VSUBPS       Y4, Y1, Y1                 \
	VANDPS       Y2, Y0, Y4                 \
	VSUBPS       Y10, Y0, Y0                \
	VADDPS       Y4, Y0, Y0                 \
	VBROADCASTSS logconst<>+32(SB), Y3      \
	STEP(36)                                \
	STEP(40)                                \
	STEP(44)                                \
	STEP(48)                                \
	STEP(52)                                \
	STEP(56)                                \
	STEP(60)                                \
	STEP(64)                                \
	VMULPS       Y0, Y0, Y2                 \
	VMULPS       Y0, Y3, Y3                 \
	VMULPS       Y2, Y3, Y3                 \
	VBROADCASTSS logconst<>+20(SB), Y4      \
	VFMADD231PS  Y4, Y1, Y3                 \
	VFNMADD231PS Y9, Y2, Y3                 \
	VADDPS       Y3, Y0, Y0                 \
	VBROADCASTSS logconst<>+24(SB), Y4      \
	VFMADD231PS  Y4, Y1, Y0                 \
	VMULPS       Y5, Y0, Y0

// func mixture(p, q *float32, n int, scale float32) float64
TEXT ·mixture(SB), NOSPLIT, $0-40
	MOVQ         p+0(FP), DI
	MOVQ         q+8(FP), SI
	MOVQ         n+16(FP), CX
	VBROADCASTSS scale+24(FP), Y15
	VXORPS       Y6, Y6, Y6
	VXORPS       Y7, Y7, Y7

mixbody:
	CMPQ    CX, $8
	JLT     mixrest
	VMOVUPS (SI), Y0
	VMOVUPS (DI), Y3
	MIXTURE
	GATHER
	ADDQ    $32, SI
	ADDQ    $32, DI
	SUBQ    $8, CX
	JMP     mixbody

mixrest:
	TESTQ CX, CX
	JZ    mixdone
	MASK(CX, AX, Y8)
	VMASKMOVPS (SI), Y8, Y0
	VMASKMOVPS (DI), Y8, Y3
	MIXTURE
	GATHER

mixdone:
	TOTAL
	VMOVSD X6, ret+32(FP)
	VZEROUPPER
	RET
