//go:build amd64 && !purego

#include "textflag.h"

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
