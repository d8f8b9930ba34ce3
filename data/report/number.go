package report

import (
	"fmt"
	"strconv"
	"strings"
)

// none stands where nothing was counted.
const none = "n/a"

// fixed writes a number with a fixed number of decimals.
func fixed(v *float64, digits int) string {
	if v == nil {
		return none
	}
	return strconv.FormatFloat(*v, 'f', digits, 64)
}

func signed(v *float64, digits int) string {
	if v == nil {
		return none
	}
	s := fmt.Sprintf("%+.*f", digits, *v)
	if strings.Trim(s, "+-0.") == "" {
		return s[1:]
	}
	if s[0] == '-' {
		return "−" + s[1:]
	}
	return s
}

// interval writes "95 % 0.10 to 0.20", or without a sign "0.10–0.20".
func interval(e Estimate, digits int, sign bool) string {
	if e.Low == nil || e.High == nil {
		return pick(sign, "no interval", none)
	}
	if sign {
		return fmt.Sprintf("95 %% %s to %s", signed(e.Low, digits), signed(e.High, digits))
	}
	return fixed(e.Low, digits) + "–" + fixed(e.High, digits)
}

// quantity is "1 sequence", "12,345 sequences".
func quantity(n int64, noun string) string { return count(n) + " " + noun + pick(n == 1, "", "s") }

// count groups thousands: 12,345.
func count(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
