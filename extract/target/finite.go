package target

import (
	"fmt"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/schemas"
)

// checkFinite is the check that faults name: no NaN and no infinity, in any
// row of any recorded state.
const checkFinite = "K1"

// findFault describes the first of rows that holds values which are not
// finite; "" when there is none. odd counts them by row, rows hold width
// bytes each, and the first is row pos of its sequence.
func findFault(odd []int32, rows []byte, width, pos, state int, as schemas.DType) string {
	for r, n := range odd {
		if n == 0 {
			continue
		}
		nans := 0
		for _, v := range as.AppendFloats(nil, rows[r*width:(r+1)*width]) {
			if v != v {
				nans++
			}
		}
		return fmt.Sprintf("row %d, state %d: %d NaN, %d Inf", pos+r, state, nans, int(n)-nans)
	}
	return ""
}

// asCuda is a recorded dtype as devices name it, and recorded the way back.
func asCuda(d schemas.DType) cuda.DType {
	if d == schemas.BF16 {
		return cuda.BF16
	}
	return cuda.F32
}

func recorded(d cuda.DType) schemas.DType {
	if d == cuda.BF16 {
		return schemas.BF16
	}
	return schemas.F32
}
