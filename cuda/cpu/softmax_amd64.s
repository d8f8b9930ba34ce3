//go:build amd64 && !purego

#include "textflag.h"
#include "kernel_amd64.h"

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
