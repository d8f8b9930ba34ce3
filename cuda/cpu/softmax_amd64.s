//go:build amd64 && !purego

#include "textflag.h"
#include "kernel_amd64.h"
#include "exp_amd64.h"

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
