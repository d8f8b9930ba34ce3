package report

import (
	"fmt"
	"math"
	"strings"
)

// A chart is a drawing in SVG's own terms, ready for the template. Colours
// are classes, so that the page's style gives light and dark ones. Charts are
// drawn about as wide as a phone, so that their letters stay legible there.
type chart struct {
	W, H  float64
	Title string // for screen readers
	Lines []segment
	Bands []shape
	Rects []rect
	Paths []shape
	Marks []shape
	Texts []label
}

type segment struct {
	X1, Y1, X2, Y2 float64
	Class          string
}

type shape struct {
	D     string
	Class string
	Tip   string
}

type rect struct {
	X, Y, W, H float64
	Class, Tip string
}

type label struct {
	X, Y          float64
	Anchor, Class string
	S             string
}

const (
	chartWidth  = 440.0
	chartHeight = 290.0
)

// axes maps data to a frame inside a chart and draws grid, ticks and titles.
type axes struct {
	c                        *chart
	left, top, right, bottom float64 // of the frame
	x0, x1, y0, y1           float64 // data at its edges
}

func newAxes(c *chart, left float64, x0, x1, y0, y1 float64) axes {
	return axes{c, left, 24, c.W - 12, c.H - 42, x0, x1, y0, y1}
}

func (a axes) x(v float64) float64 { return a.left + (v-a.x0)/(a.x1-a.x0)*(a.right-a.left) }
func (a axes) y(v float64) float64 { return a.bottom - (v-a.y0)/(a.y1-a.y0)*(a.bottom-a.top) }

func (a axes) yTicks(ticks []float64, format func(float64) string, title string) {
	for _, t := range ticks {
		a.c.Lines = append(a.c.Lines, segment{a.left, a.y(t), a.right, a.y(t), "grid"})
		a.c.Texts = append(a.c.Texts, label{a.left - 7, a.y(t) + 4, "end", "tick", format(t)})
	}
	a.c.Texts = append(a.c.Texts, label{2, 12, "start", "axis", title})
}

func (a axes) xTick(at float64, s string) {
	a.c.Texts = append(a.c.Texts, label{a.x(at), a.bottom + 17, "middle", "tick", s})
}

func (a axes) xTitle(s string) {
	a.c.Lines = append(a.c.Lines, segment{a.left, a.bottom, a.right, a.bottom, "base"})
	a.c.Texts = append(a.c.Texts, label{(a.left + a.right) / 2, a.c.H - 4, "middle", "axis", s})
}

// point is one estimate at x.
type point struct {
	x   float64
	e   Estimate
	tip string
}

// series draws one drafter: a band or whiskers for intervals, a line, marks.
// Points without a value break the line.
func (a axes) series(i int, points []point, whiskers bool) {
	class := seriesClass(i)
	var line, upper, lower []string
	flush := func() {
		if len(upper) > 1 {
			a.c.Bands = append(a.c.Bands, shape{D: "M" + strings.Join(append(upper, reversed(lower)...), "L") + "Z", Class: class})
		}
		if len(line) > 1 {
			a.c.Paths = append(a.c.Paths, shape{D: "M" + strings.Join(line, "L"), Class: class})
		}
		line, upper, lower = nil, nil, nil
	}
	for _, p := range points {
		if p.e.Value == nil {
			flush()
			continue
		}
		x, y := a.x(p.x), a.y(*p.e.Value)
		line = append(line, xy(x, y))
		low, high := y, y
		if p.e.Low != nil && p.e.High != nil {
			low, high = a.y(*p.e.Low), a.y(*p.e.High)
		}
		if whiskers {
			if low != high {
				a.c.Paths = append(a.c.Paths, shape{D: fmt.Sprintf("M%sL%sM%sL%sM%sL%s", xy(x, low), xy(x, high), xy(x-4, low), xy(x+4, low), xy(x-4, high), xy(x+4, high)), Class: "whisker " + class})
			}
		} else {
			upper, lower = append(upper, xy(x, high)), append(lower, xy(x, low))
		}
		a.c.Marks = append(a.c.Marks, shape{D: mark(i, x, y), Class: class, Tip: p.tip})
	}
	flush()
}

func seriesClass(i int) string { return fmt.Sprintf("s%d", i%seriesColours) }

// seriesColours is how many colours the style has; shapes repeat in step.
const seriesColours = 8

// mark draws the shape of series i, so that no reader needs the colour.
func mark(i int, x, y float64) string {
	const r = 4.0
	polygon := func(points ...float64) string {
		var b strings.Builder
		for j := 0; j < len(points); j += 2 {
			b.WriteString(pick(j == 0, "M", "L") + xy(x+points[j], y+points[j+1]))
		}
		return b.String() + "Z"
	}
	switch i % seriesColours {
	case 0:
		return fmt.Sprintf("M%sa%g,%g 0 1,0 %g,0a%g,%g 0 1,0 %g,0Z", xy(x-r, y), r, r, 2*r, r, r, -2*r)
	case 1:
		return polygon(-3.5, -3.5, 3.5, -3.5, 3.5, 3.5, -3.5, 3.5)
	case 2:
		return polygon(0, -5, 4.6, 3.4, -4.6, 3.4)
	case 3:
		return polygon(0, -5.2, 5.2, 0, 0, 5.2, -5.2, 0)
	case 4:
		return polygon(0, 5, 4.6, -3.4, -4.6, -3.4)
	case 5:
		return polygon(-1.5, -5, 1.5, -5, 1.5, -1.5, 5, -1.5, 5, 1.5, 1.5, 1.5, 1.5, 5, -1.5, 5, -1.5, 1.5, -5, 1.5, -5, -1.5, -1.5, -1.5)
	case 6:
		return polygon(-5, -2.5, 5, -2.5, 5, 2.5, -5, 2.5)
	}
	return polygon(-2.5, -5, 2.5, -5, 2.5, 5, -2.5, 5)
}

func xy(x, y float64) string { return fmt.Sprintf("%.1f,%.1f", x, y) }

func reversed(v []string) []string {
	out := make([]string, len(v))
	for i, s := range v {
		out[len(v)-1-i] = s
	}
	return out
}

// nice gives round ticks that cover lo to hi, about n of them.
func nice(lo, hi float64, n int) []float64 {
	if hi <= lo {
		hi = lo + 1
	}
	raw := (hi - lo) / float64(n)
	unit := math.Pow(10, math.Floor(math.Log10(raw)))
	step := unit * 10
	for _, m := range []float64{1, 2, 2.5, 5} {
		if unit*m >= raw*0.999 {
			step = unit * m
			break
		}
	}
	var ticks []float64
	for i := math.Floor(lo/step + 1e-9); ; i++ {
		ticks = append(ticks, i*step)
		if i*step >= hi-step*1e-9 {
			return ticks
		}
	}
}

func percent(v float64) string { return fmt.Sprintf("%.0f %%", 100*v) }

func plain(v float64) string { return strings.TrimSuffix(fmt.Sprintf("%.4g", v), ".0") }
