//go:build amd64 && !purego

#include "textflag.h"
#include "kernel_amd64.h"

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
