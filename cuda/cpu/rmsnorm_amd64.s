//go:build amd64 && !purego

#include "textflag.h"
#include "kernel_amd64.h"

// func squares(x *float32, n int) float64
TEXT ·squares(SB), NOSPLIT, $0-24
	MOVQ   x+0(FP), SI
	MOVQ   n+8(FP), CX
	VXORPS Y6, Y6, Y6
	VXORPS Y7, Y7, Y7

body:
	CMPQ        CX, $8
	JLT         rest
	VCVTPS2PD   (SI), Y0
	VCVTPS2PD   16(SI), Y1
	VFMADD231PD Y0, Y0, Y6
	VFMADD231PD Y1, Y1, Y7
	ADDQ        $32, SI
	SUBQ        $8, CX
	JMP         body

rest:
	TESTQ CX, CX
	JZ    done
	MASK(CX, AX, Y8)
	VMASKMOVPS   (SI), Y8, Y0
	VEXTRACTF128 $1, Y0, X1
	VCVTPS2PD    X0, Y0
	VCVTPS2PD    X1, Y1
	VFMADD231PD  Y0, Y0, Y6
	VFMADD231PD  Y1, Y1, Y7

done:
	TOTAL
	VMOVSD X6, ret+16(FP)
	VZEROUPPER
	RET

// func scaled(dst, x, w *float32, n int, s float32)
TEXT ·scaled(SB), NOSPLIT, $0-36
	MOVQ         dst+0(FP), DI
	MOVQ         x+8(FP), SI
	MOVQ         w+16(FP), R8
	MOVQ         n+24(FP), CX
	VBROADCASTSS s+32(FP), Y15

scale:
	CMPQ    CX, $8
	JLT     scalerest
	VMULPS  (SI), Y15, Y0
	VMULPS  (R8), Y0, Y0
	VMOVUPS Y0, (DI)
	ADDQ    $32, SI
	ADDQ    $32, DI
	ADDQ    $32, R8
	SUBQ    $8, CX
	JMP     scale

scalerest:
	TESTQ CX, CX
	JZ    scaledone
	MASK(CX, AX, Y8)
	VMASKMOVPS (SI), Y8, Y0
	VMASKMOVPS (R8), Y8, Y1
	VMULPS     Y0, Y15, Y0
	VMULPS     Y1, Y0, Y0
	VMASKMOVPS Y0, Y8, (DI)

scaledone:
	VZEROUPPER
	RET
