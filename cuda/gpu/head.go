//go:build cuda && cgo

package gpu

import (
	"errors"
	"fmt"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// What one run of rows may take.
const (
	headLogits = 256 << 20 // bytes of logits, draft and target together
	headRows   = 1 << 16
	headTop    = 1 << 20 // ids of top logits
)

// heading is one call of Head.
type heading struct {
	cuda.HeadArgs
	hidden, weight, target matrix
	cuda.HeadResult
}

// Head implements [cuda.Device]; see kernels/head.cu. It goes through the rows
// in runs whose logits fit into a workspace, so that its memory does not grow
// with them.
func (d *Device) Head(args cuda.HeadArgs) (cuda.HeadResult, error) {
	if err := args.Check(); err != nil {
		return cuda.HeadResult{}, err
	}
	if args.Losses == 0 {
		args.Target = cuda.Tensor{}
	}
	m, err := d.views("head", args.Hidden, args.Weight, args.Target)
	if err != nil {
		return cuda.HeadResult{}, err
	}
	h := &heading{HeadArgs: args, hidden: m[0], weight: m[1], target: m[2]}
	rows, vocab := args.Hidden.Rows, args.Weight.Rows
	h.allocate(rows)
	if rows == 0 {
		return h.HeadResult, nil
	}
	kinds := 1
	if args.Losses != 0 {
		kinds = 2
	}
	run := max(1, min(rows, headRows, headLogits/(4*kinds*vocab), headTop/max(args.K, 1)))
	if d.fastHead(h) {
		run = fastRun(h)
	}
	err = d.card.Do(func() error {
		for lo := 0; lo < rows; lo += run {
			one := d.head
			if d.fastHead(h) {
				one = d.headFast
			}
			if err := one(h, lo, min(lo+run, rows)); err != nil {
				return err
			}
		}
		return nil
	})
	return h.HeadResult, err
}

// allocate makes room for what was asked for.
func (h *heading) allocate(rows int) {
	h.LSE = make([]float32, rows)
	if h.K > 0 {
		h.TopIDs, h.TopLogits = make([]int32, rows*h.K), make([]float32, rows*h.K)
	}
	if h.Labels != nil {
		h.LabelLogit, h.LabelRank = make([]float32, rows), make([]int32, rows)
	}
	for loss, to := range map[cuda.Losses]*[]float32{cuda.KL: &h.KL, cuda.RKL: &h.RKL, cuda.JSD: &h.JSD, cuda.TV: &h.TV} {
		if h.Losses&loss != 0 {
			*to = make([]float32, rows)
		}
	}
}

// reduced is what a row of logits comes down to, on the device.
type reduced struct {
	logits                        matrix
	top, logSum                   driver.Ptr
	ids, values, labelLogit, rank driver.Ptr
}

// head computes rows lo..hi-1 and waits for them.
func (d *Device) head(h *heading, lo, hi int) error {
	n := hi - lo
	var labels []int32
	if h.Labels != nil {
		labels = h.Labels[lo:hi]
	}
	draft, err := d.reduce("draft", d.rowRange(h.hidden, lo, hi), h.weight, h.K, labels)
	if err != nil {
		return err
	}
	var losses driver.Ptr
	if h.Losses != 0 {
		if losses, err = d.losses(h, draft, h.TargetRow[lo:hi]); err != nil {
			return err
		}
	}
	top, logSum := make([]float32, n), make([]float64, n)
	list := []fetched{{bytesOf(top), draft.top}, {bytesOf(logSum), draft.logSum}}
	if h.K > 0 {
		list = append(list, fetched{bytesOf(h.TopIDs[lo*h.K : hi*h.K]), draft.ids}, fetched{bytesOf(h.TopLogits[lo*h.K : hi*h.K]), draft.values})
	}
	if labels != nil {
		list = append(list, fetched{bytesOf(h.LabelLogit[lo:hi]), draft.labelLogit}, fetched{bytesOf(h.LabelRank[lo:hi]), draft.rank})
	}
	for i, to := range [][]float32{h.KL, h.RKL, h.JSD, h.TV} {
		if to != nil {
			list = append(list, fetched{bytesOf(to[lo:hi]), losses + driver.Ptr(i*n*4)})
		}
	}
	if err := d.fetch(list); err != nil {
		return err
	}
	for i := range n {
		h.LSE[lo+i] = float32(float64(top[i]) + logSum[i])
	}
	return nil
}

// reduce starts the product of states with the vocabulary head and the
// reduction of its rows, in rooms named after who.
func (d *Device) reduce(who string, states, weight matrix, k int, labels []int32) (r reduced, err error) {
	n, vocab := states.rows, weight.rows
	stride := ceil(vocab, 8) * 8
	for _, part := range []struct {
		name  string
		bytes int
		to    *driver.Ptr
	}{
		{"logits", n * stride * 4, &r.logits.at},
		{"top", n * 4, &r.top},
		{"log sum", n * 8, &r.logSum},
		{"ids", n * k * 4, &r.ids},
		{"values", n * k * 4, &r.values},
		{"label logit", len(labels) * 4, &r.labelLogit},
		{"rank", len(labels) * 4, &r.rank},
	} {
		if part.bytes == 0 {
			continue
		}
		if *part.to, err = d.room(who+" "+part.name, part.bytes); err != nil {
			return r, fmt.Errorf("making room for the %s of %d rows: %w", part.name, n, err)
		}
	}
	r.logits.rows, r.logits.cols, r.logits.stride = n, vocab, stride
	if err := d.product(r.logits, states, weight, false, true); err != nil {
		return r, err
	}
	at := make([]driver.Ptr, 1)
	if labels != nil {
		if at, err = d.params.send(bytesOf(labels)); err != nil {
			return r, err
		}
	}
	return r, d.launch("head", "head_reduce", driver.Grid{Blocks: [3]int{n}, Threads: [3]int{256}},
		r.logits.at, stride, vocab, k, at[0], r.top, r.logSum, r.ids, r.values, r.labelLogit, r.rank)
}

// losses starts the divergences of draft rows from their target rows. The
// four losses lie one after the other in what it returns.
func (d *Device) losses(h *heading, draft reduced, targetRow []int32) (driver.Ptr, error) {
	// Rows often share a target: each is multiplied once a run.
	var distinct []int32
	entry := map[int32]int32{}
	which := make([]int32, len(targetRow))
	for i, r := range targetRow {
		if r < 0 {
			which[i] = -1
			continue
		}
		e, ok := entry[r]
		if !ok {
			e = int32(len(distinct))
			entry[r] = e
			distinct = append(distinct, r)
		}
		which[i] = e
	}
	var target reduced
	if len(distinct) > 0 {
		states := matrix{rows: len(distinct), cols: h.target.cols, stride: h.target.cols}
		var err error
		if states.at, err = d.room("target states", states.rows*states.cols*d.width); err != nil {
			return 0, err
		}
		if err = d.gather(states, h.target, distinct); err != nil {
			return 0, err
		}
		if target, err = d.reduce("target", states, h.weight, 0, nil); err != nil {
			return 0, err
		}
	}
	n := len(targetRow)
	out, err := d.room("losses", 4*n*4)
	if err != nil {
		return 0, err
	}
	at, err := d.params.send(bytesOf(which))
	if err != nil {
		return 0, err
	}
	loss := func(i int) driver.Ptr { return out + driver.Ptr(i*n*4) }
	return out, d.launch("head", "head_losses", driver.Grid{Blocks: [3]int{n}, Threads: [3]int{256}},
		draft.logits.at, draft.logits.stride, draft.top, draft.logSum, target.logits.at, target.logits.stride, target.top, target.logSum,
		at[0], draft.logits.cols, loss(0), loss(1), loss(2), loss(3))
}

// read reads n bytes back and waits for them. They lie in pinned memory until
// the next copy.
func (d *Device) read(from driver.Ptr, n int) ([]byte, error) {
	half := d.host.half[0]
	if n > len(half) {
		return nil, errors.New("reading back a result that is larger than pinned memory")
	}
	rows := driver.Rows{Count: 1, Width: n, Pitch: n}
	return half[:n], errors.Join(d.card.WaitFor(d.host.free[0]), d.card.ToHost(half, from, rows), d.card.Wait())
}

// fetched is a dense array to be read back.
type fetched struct {
	to   []byte
	from driver.Ptr
}

// fetch reads arrays back, through pinned memory, and waits for them.
func (d *Device) fetch(list []fetched) error {
	half := d.host.half[0]
	if err := d.card.WaitFor(d.host.free[0]); err != nil {
		return err
	}
	for len(list) > 0 {
		used, n := 0, 0
		for ; n < len(list) && used+len(list[n].to) <= len(half); n++ {
			width := len(list[n].to)
			if err := d.card.ToHost(half[used:], list[n].from, driver.Rows{Count: 1, Width: width, Pitch: width}); err != nil {
				return err
			}
			used += width
		}
		if n == 0 {
			return errors.New("reading back a result that is larger than pinned memory")
		}
		if err := d.card.Wait(); err != nil {
			return err
		}
		used = 0
		for _, f := range list[:n] {
			used += copy(f.to, half[used:])
		}
		list = list[n:]
	}
	return nil
}
