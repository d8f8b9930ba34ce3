package cpu

import (
	"sync"
	"sync/atomic"
)

// grain is the work, in multiply-adds or so, below which a second goroutine
// costs more than it brings.
const grain = 1 << 15

// each calls f(0), ..., f(n-1), on several goroutines when the whole is worth
// it; cost is the work of one call. It returns when all calls have. Calls
// must write to places of their own: which goroutine runs which is chance.
func (d *Device) each(n, cost int, f func(i int)) {
	workers := min(d.threads, n, 1+n*max(cost, 1)/grain)
	if workers <= 1 {
		for i := range n {
			f(i)
		}
		return
	}
	var next atomic.Int64
	work := func() {
		for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
			f(int(i))
		}
	}
	var wg sync.WaitGroup
	for range workers - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
}

// rows calls f for row ranges that cover 0..n-1; cost is the work of a row.
func (d *Device) rows(n, cost int, f func(lo, hi int)) {
	step := max(1, min(grain/max(cost, 1), (n+d.threads-1)/d.threads))
	chunks := (n + step - 1) / step
	d.each(chunks, cost*step, func(i int) { f(i*step, min(n, (i+1)*step)) })
}
