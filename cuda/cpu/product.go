package cpu

// Tiles of a product, the unit that threads share.
const (
	tileRows = 64
	tileCols = 192
)

// product sets c = a·wᵀ, or adds that to c, sharing the tiles among the
// device's threads.
func (d *Device) product(c, a, w matrix, add bool) {
	down, across := (c.rows+tileRows-1)/tileRows, (c.cols+tileCols-1)/tileCols
	cost := min(c.rows, tileRows) * min(c.cols, tileCols) * a.cols
	d.each(down*across, cost, func(i int) {
		// Consecutive tiles share the rows of w, which then stay in cache.
		r, n := i%down*tileRows, i/down*tileCols
		r1, n1 := min(r+tileRows, c.rows), min(n+tileCols, c.cols)
		multiply(c.block(r, r1, n, n1), a.block(r, r1, 0, a.cols), w.block(n, n1, 0, w.cols), add)
	})
}

// multiply is product on this goroutine.
func multiply(c, a, w matrix, add bool) {
	switch {
	case c.rows == 0 || c.cols == 0:
	case a.cols > 0:
		kernels.multiply(c, a, w, add)
	case !add:
		for i := range c.rows {
			clear(c.row(i))
		}
	}
}
