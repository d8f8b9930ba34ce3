package target

import (
	"fmt"
	"math"

	"github.com/draftscope/draftscope/schemas"
)

// checkFinite is the check that faults name: no NaN and no infinity, in any
// row of any recorded state.
const checkFinite = "K1"

// findFault describes the first row of vals, whose rows have width values and
// whose first is row pos of its sequence, that dtype could not hold as finite
// values; "" when there is none.
func findFault(vals []float32, width, pos, state int, dtype schemas.DType) string {
	for r := 0; r < len(vals); r += width {
		nans, infs := 0, 0
		for _, v := range vals[r : r+width] {
			switch {
			case v != v:
				nans++
			case overflows(v, dtype):
				infs++
			}
		}
		if nans+infs > 0 {
			return fmt.Sprintf("row %d, state %d: %d NaN, %d Inf", pos+r/width, state, nans, infs)
		}
	}
	return ""
}

// overflows reports whether v is infinite, or becomes so in dtype.
func overflows(v float32, dtype schemas.DType) bool {
	const largest = 0x7f7f7fff // the largest float32 that rounds to a finite bf16
	bits := math.Float32bits(v) &^ (1 << 31)
	return bits >= 0x7f800000 || dtype == schemas.BF16 && bits > largest
}
