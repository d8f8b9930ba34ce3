package sound

import (
	"fmt"
	"math"
	"slices"
)

// Size is how large the rows of a state are: the quartiles of their RMS.
type Size struct {
	Low  float64 `json:"low"`
	Mid  float64 `json:"mid"`
	High float64 `json:"high"`
}

// Profile is the size of a target's states, by number.
type Profile map[int]Size

const (
	// band is by which factor the median of many rows may differ from the
	// profile's. Over 24 texts of the shipped target it differs by less than 1.2.
	band = 1.5
	// spread widens the band for few rows, whose median varies: by the ratio of
	// quartile and median to the power of spread/√rows.
	spread = 4
	// lead are the first rows of a text, which are many times as large as the
	// others and are left out. enough is the fewest of the others that are
	// judged, or that make a profile.
	lead   = 4
	enough = 12
)

// Sizes collects rows from which a size is told.
type Sizes []float64

// Add takes the RMS of the rows of one text, in order.
func (s *Sizes) Add(rms []float64) { *s = append(*s, rms[min(lead, len(rms)):]...) }

// Size is the size of the rows; ok is false of too few.
func (s Sizes) Size() (size Size, ok bool) {
	if len(s) < enough {
		return size, false
	}
	sorted := slices.Sorted(slices.Values(s))
	at := func(quarter int) float64 { return rounded(sorted[(quarter*(len(sorted)-1)+2)/4]) }
	size = Size{at(1), at(2), at(3)}
	return size, size.Low > 0 && !math.IsInf(size.High, 0) && !math.IsNaN(size.High)
}

// rounded keeps four digits: more would say more than a profile knows.
func rounded(v float64) float64 {
	if v == 0 || math.IsInf(v, 0) || math.IsNaN(v) {
		return v
	}
	scale := math.Pow(10, 3-math.Floor(math.Log10(math.Abs(v))))
	return math.Round(v*scale) / scale
}

// Check is K7: what is wrong with the rows of these RMS, in order, of a state;
// "" when nothing is, or where the profile or the rows do not say.
func (p Profile) Check(state int, rms []float64) string {
	want, ok := p[state]
	if !ok || len(rms) < lead+enough {
		return ""
	}
	rows := rms[lead:]
	have := slices.Sorted(slices.Values(rows))[len(rows)/2]
	few := spread / math.Sqrt(float64(len(rows)))
	most := band * want.Mid * math.Pow(want.High/want.Mid, few)
	least := want.Mid / band * math.Pow(want.Low/want.Mid, few)
	if have > most || have < least {
		return fmt.Sprintf("rows of RMS %.4g, where this target has %.4g: a ratio of %.3g; its values may be of another dtype, state or scale", have, want.Mid, have/want.Mid)
	}
	return ""
}
