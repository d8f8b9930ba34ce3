//go:build amd64 && !purego

#include "textflag.h"
#include "kernel_amd64.h"

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

// ROWTAIL multiplies the masked rest of a row of w with that of a (Y15).
#define ROWTAIL(at, s) \
	VMASKMOVPS  at, Y14, Y13 \
	VFMADD231PS Y13, Y15, s

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

// func dots1(out, a, w *float32, ldw, tiles, body, rest int)
TEXT ·dots1(SB), NOSPLIT, $0-56
	MOVQ out+0(FP), DI
	MOVQ w+16(FP), DX
	MOVQ ldw+24(FP), SI
	LEAQ (SI)(SI*2), R13

row:
	LEAQ   (DX)(R13*1), R8
	LEAQ   (R8)(R13*1), R9
	LEAQ   (R9)(R13*1), R10
	MOVQ   a+8(FP), R11
	MOVQ   body+40(FP), CX
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
	TESTQ  CX, CX
	JZ     rowrest

rowbody:
	VMOVUPS     (R11), Y15
	VFMADD231PS (DX), Y15, Y0
	VFMADD231PS (DX)(SI*1), Y15, Y1
	VFMADD231PS (DX)(SI*2), Y15, Y2
	VFMADD231PS (R8), Y15, Y3
	VFMADD231PS (R8)(SI*1), Y15, Y4
	VFMADD231PS (R8)(SI*2), Y15, Y5
	VFMADD231PS (R9), Y15, Y6
	VFMADD231PS (R9)(SI*1), Y15, Y7
	VFMADD231PS (R9)(SI*2), Y15, Y8
	VFMADD231PS (R10), Y15, Y9
	VFMADD231PS (R10)(SI*1), Y15, Y10
	VFMADD231PS (R10)(SI*2), Y15, Y11
	ADDQ        $32, R11
	ADDQ        $32, DX
	ADDQ        $32, R8
	ADDQ        $32, R9
	ADDQ        $32, R10
	SUBQ        $32, CX
	JNZ         rowbody

rowrest:
	MOVQ  rest+48(FP), CX
	TESTQ CX, CX
	JZ    rowsum
	MASK(CX, BX, Y14)
	VMASKMOVPS (R11), Y14, Y15
	ROWTAIL((DX), Y0)
	ROWTAIL((DX)(SI*1), Y1)
	ROWTAIL((DX)(SI*2), Y2)
	ROWTAIL((R8), Y3)
	ROWTAIL((R8)(SI*1), Y4)
	ROWTAIL((R8)(SI*2), Y5)
	ROWTAIL((R9), Y6)
	ROWTAIL((R9)(SI*1), Y7)
	ROWTAIL((R9)(SI*2), Y8)
	ROWTAIL((R10), Y9)
	ROWTAIL((R10)(SI*1), Y10)
	ROWTAIL((R10)(SI*2), Y11)

rowsum:
	SUM3(Y0, Y1, Y2, X0)
	SUM3(Y3, Y4, Y5, X3)
	SUM3(Y6, Y7, Y8, X6)
	SUM3(Y9, Y10, Y11, X9)
	VMOVUPS X0, (DI)
	VMOVUPS X3, 12(DI)
	VMOVUPS X6, 24(DI)
	VMOVUPS X9, 36(DI)
	ADDQ    $48, DI
	LEAQ    (R10)(R13*1), DX
	SUBQ    body+40(FP), DX
	DECQ    tiles+32(FP)
	JNZ     row
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
