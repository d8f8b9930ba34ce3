// e^x as in exp.go: 2^n·e^r, a polynomial of degree 6 for e^r.

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
