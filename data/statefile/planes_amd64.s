//go:build amd64 && !purego

#include "textflag.h"

// func split32(low, high, src *byte, blocks int)
// Blocks are of 32 values: 64 bytes of src.
TEXT ·split32(SB), NOSPLIT, $0-32
	MOVQ     low+0(FP), DI
	MOVQ     high+8(FP), R8
	MOVQ     src+16(FP), SI
	MOVQ     blocks+24(FP), CX
	VPCMPEQW Y15, Y15, Y15
	VPSRLW   $8, Y15, Y15 // 0x00ff in each word

block:
	TESTQ     CX, CX
	JZ        done
	VMOVDQU   (SI), Y0
	VMOVDQU   32(SI), Y1
	VPAND     Y15, Y0, Y2
	VPAND     Y15, Y1, Y3
	VPSRLW    $8, Y0, Y0
	VPSRLW    $8, Y1, Y1
	VPACKUSWB Y3, Y2, Y2 // halves of both, in turn
	VPACKUSWB Y1, Y0, Y0
	VPERMQ    $0xd8, Y2, Y2
	VPERMQ    $0xd8, Y0, Y0
	VMOVDQU   Y2, (DI)
	VMOVDQU   Y0, (R8)
	ADDQ      $64, SI
	ADDQ      $32, DI
	ADDQ      $32, R8
	DECQ      CX
	JMP       block

done:
	VZEROUPPER
	RET

// func squares8(sums *[8]float64, src *byte, blocks int)
// Blocks are of 8 values of bf16. Squares and sums are rounded one by one, as
// Go does it: no fused multiply-add.
TEXT ·squares8(SB), NOSPLIT, $0-24
	MOVQ    sums+0(FP), DI
	MOVQ    src+8(FP), SI
	MOVQ    blocks+16(FP), CX
	VMOVUPD (DI), Y0
	VMOVUPD 32(DI), Y1

block:
	TESTQ        CX, CX
	JZ           done
	VPMOVZXWD    (SI), Y2
	VPSLLD       $16, Y2, Y2
	VEXTRACTF128 $1, Y2, X4
	VCVTPS2PD    X2, Y3
	VCVTPS2PD    X4, Y5
	VMULPD       Y3, Y3, Y3
	VMULPD       Y5, Y5, Y5
	VADDPD       Y3, Y0, Y0
	VADDPD       Y5, Y1, Y1
	ADDQ         $16, SI
	DECQ         CX
	JMP          block

done:
	VMOVUPD Y0, (DI)
	VMOVUPD Y1, 32(DI)
	VZEROUPPER
	RET
