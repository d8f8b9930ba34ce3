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
