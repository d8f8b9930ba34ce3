//go:build amd64 && !purego

#include "textflag.h"
#include "kernel_amd64.h"
#include "exp_amd64.h"

DATA sign<>+0(SB)/4, $0x80000000
GLOBL sign<>(SB), RODATA|NOPTR, $4

// GATE turns the gate in Y0 into its sigmoid, or where DX is not 0 into gate
// times sigmoid, in Y2. The exponent is never above 0: the sigmoid is 1/(1+e)
// or e/(1+e), e = e^-|gate|, by the gate's sign.
#define GATE(skip) \
	VMOVAPS      Y0, Y5          \
	VBROADCASTSS sign<>(SB), Y1  \
	VORPS        Y1, Y0, Y0      \
	EXP                          \
	VADDPS       Y9, Y0, Y1      \
	VBLENDVPS    Y5, Y0, Y9, Y2  \
	VDIVPS       Y1, Y2, Y2      \
	TESTQ        DX, DX          \
	JZ           skip            \
	VMULPS       Y5, Y2, Y2

// func gate(dst, by, x *float32, n, times int)
TEXT ·gate(SB), NOSPLIT, $0-40
	MOVQ         dst+0(FP), DI
	MOVQ         by+8(FP), SI
	MOVQ         x+16(FP), R8
	MOVQ         n+24(FP), CX
	MOVQ         times+32(FP), DX
	VXORPS       Y15, Y15, Y15
	VBROADCASTSS expconst<>+16(SB), Y14
	VBROADCASTSS expconst<>+4(SB), Y13
	VBROADCASTSS expconst<>+0(SB), Y12
	VBROADCASTSS expconst<>+8(SB), Y11
	VBROADCASTSS expconst<>+12(SB), Y10
	VBROADCASTSS expconst<>+20(SB), Y9

body:
	CMPQ    CX, $8
	JLT     rest
	VMOVUPS (SI), Y0
	GATE(store)

store:
	VMULPS  (R8), Y2, Y2
	VMOVUPS Y2, (DI)
	ADDQ    $32, SI
	ADDQ    $32, DI
	ADDQ    $32, R8
	SUBQ    $8, CX
	JMP     body

rest:
	TESTQ CX, CX
	JZ    done
	MASK(CX, AX, Y8)
	VMASKMOVPS (SI), Y8, Y0
	GATE(last)

last:
	VMASKMOVPS (R8), Y8, Y0
	VMULPS     Y0, Y2, Y2
	VMASKMOVPS Y2, Y8, (DI)

done:
	VZEROUPPER
	RET
