package diagnose

import (
	"encoding/json"
	"math"
)

// Interval is a measurement with its 95 % interval.
type Interval struct {
	Value, Low, High float64
}

// MarshalJSON writes null for what could not be counted: JSON has no NaN.
func (i Interval) MarshalJSON() ([]byte, error) {
	number := func(v float64) *float64 {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return nil
		}
		return &v
	}
	return json.Marshal(map[string]*float64{"value": number(i.Value), "low": number(i.Low), "high": number(i.High)})
}
