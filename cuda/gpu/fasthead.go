//go:build cuda && cgo

package gpu

import (
	"fmt"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// The constants of kernels/fast_head.cu that its launches need; a test
// compares them with the source.
const (
	fastWide       = 256 // logits of a tile without losses
	fastNarrow     = 128 // and with
	fastThreads    = 384
	fastShared     = 4*6*8192 + 1024 + 64 + 768*16 + 8
	fastBeginRows  = 8
	fastBeginShare = 8*8192 + 1024
	fastMergeRows  = 16
	fastSlices     = 32
)

// What one run of rows may take.
const (
	fastParts = 128 << 20 // bytes of tiles' parts
	fastTop   = 64        // best logits of a row; more take the plain way
)

// hopper says whether the kernels named fast_* run here.
func (d *Device) hopper() bool { return d.precision == BF16 && d.card.Major == 9 && !d.plain }

// fastHead says whether the head without logits can take a call. That depends
// on the model and on what is asked for, never on the number of rows.
func (d *Device) fastHead(h *heading) bool {
	return d.hopper() && h.weight.cols >= 64 && h.weight.cols%8 == 0 && h.K <= fastTop && h.weight.rows >= fastWide
}

// fastRun is how many rows are computed at once, in whole tiles.
func fastRun(h *heading) int {
	row := ceil(h.weight.rows, fastWide) * 8
	if h.Losses != 0 {
		row = ceil(h.weight.rows, fastNarrow) * (8 + 16 + 8)
	}
	return max(1, min(h.hidden.rows, headRows, fastParts/row/256*256, stagingBytes/fastResult(h)))
}

// fastResult is how many bytes of a row's results are read back.
func fastResult(h *heading) int { return (3 + 2*h.K + 4*flag(h.Losses != 0)) * 4 }

// fastRooms is where a call's parts and results lie; 0 where it has none.
type fastRooms struct {
	draft, target, mixture                     driver.Ptr // parts of every tile
	best, ranks                                driver.Ptr
	lse, targetLSE, labelLogit, ids, top, rank driver.Ptr
	losses                                     [4]driver.Ptr // KL, RKL, JSD, TV
	results                                    driver.Ptr    // the first of those that are read back
	bytes                                      int           // of all of them
}

// fastRoom makes room for n rows. The results are one block, for one copy.
func (d *Device) fastRoom(h *heading, n, tiles int) (r fastRooms, err error) {
	k, losses := h.K, flag(h.Losses != 0)
	for _, part := range []struct {
		name  string
		bytes int
		to    *driver.Ptr
	}{
		{"draft", tiles * n * 8, &r.draft},
		{"target parts", losses * tiles * n * 16, &r.target},
		{"mixture", flag(h.Losses&(cuda.JSD|cuda.TV) != 0) * tiles * n * 8, &r.mixture},
		{"best", n * k * 8, &r.best},
		{"ranks", n * 4, &r.ranks},
		{"target lse", losses * n * 4, &r.targetLSE},
		{"results", n * fastResult(h), &r.results},
	} {
		if part.bytes == 0 {
			continue
		}
		if *part.to, err = d.room("fast "+part.name, part.bytes); err != nil {
			return r, fmt.Errorf("making room for the %s of %d rows: %w", part.name, n, err)
		}
	}
	for _, part := range []struct {
		to    *driver.Ptr
		bytes int
	}{
		{&r.lse, n * 4},
		{&r.labelLogit, n * 4},
		{&r.rank, n * 4},
		{&r.ids, n * k * 4},
		{&r.top, n * k * 4},
		{&r.losses[0], losses * n * 4},
		{&r.losses[1], losses * n * 4},
		{&r.losses[2], losses * n * 4},
		{&r.losses[3], losses * n * 4},
	} {
		if part.bytes > 0 {
			*part.to = r.results + driver.Ptr(r.bytes)
			r.bytes += part.bytes
		}
	}
	return r, nil
}

// headFast is head without logits in memory.
func (d *Device) headFast(h *heading, lo, hi int) error {
	hidden, err := d.dense("fast hidden", d.rowRange(h.hidden, lo, hi))
	if err != nil {
		return err
	}
	if h.weight, err = d.dense("fast weight", h.weight); err != nil {
		return err
	}
	width := fastWide
	var target matrix
	var targetRows []int32
	if h.Losses != 0 {
		width = fastNarrow
		if target, targetRows, err = d.fastTargets(h, lo, hi); err != nil {
			return err
		}
	}
	tiles := ceil(h.weight.rows, width)
	rooms, err := d.fastRoom(h, hi-lo, tiles)
	if err != nil {
		return err
	}
	sent, err := d.fastParams(h, lo, hi, hidden, target, targetRows)
	if err != nil {
		return err
	}
	if err := d.fastLaunch(h, hidden, sent, rooms, tiles); err != nil {
		return err
	}
	return d.fastFetch(h, lo, hi, rooms)
}

// fastLaunch starts the kernels for the rows of hidden.
func (d *Device) fastLaunch(h *heading, hidden matrix, sent fastSent, r fastRooms, tiles int) error {
	n, k, depth, vocab := hidden.rows, h.K, h.weight.cols, h.weight.rows
	begin := driver.Grid{Blocks: [3]int{ceil(n, fastBeginRows)}, Threads: [3]int{128}, Shared: fastBeginShare}
	if err := d.launch("fast_head", "fast_head_begin", begin, hidden.at, h.weight.at, sent.labels, r.labelLogit, r.best, r.ranks, n, depth, k); err != nil {
		return err
	}
	wide := driver.Grid{Blocks: [3]int{d.card.SMs / 2 * 2}, Threads: [3]int{fastThreads}, Shared: fastShared}
	var err error
	if h.Losses != 0 {
		err = d.launch("fast_head", "fast_head_both", wide, sent.hidden, sent.target, sent.weight, r.draft, r.target, r.best, r.ranks,
			sent.labels, r.labelLogit, n, vocab, depth, k)
	} else {
		err = d.launch("fast_head", "fast_head", wide, sent.hidden, sent.weight, r.draft, r.best, r.ranks,
			sent.labels, r.labelLogit, n, vocab, depth, k)
	}
	if err != nil {
		return err
	}
	merge := driver.Grid{Blocks: [3]int{ceil(n, fastMergeRows)}, Threads: [3]int{fastMergeRows, fastSlices}}
	if err := d.launch("fast_head", "fast_head_merge", merge, r.draft, r.target, r.best, r.ranks, sent.labels, sent.targetRows,
		r.lse, r.ids, r.top, r.rank, r.targetLSE, r.losses[0], r.losses[1], n, tiles, k); err != nil {
		return err
	}
	if h.Losses&(cuda.JSD|cuda.TV) == 0 {
		return nil
	}
	if err := d.launch("fast_head", "fast_head_mixture", wide, sent.hidden, sent.target, sent.weight, r.mixture, r.lse, r.targetLSE, n, vocab, depth); err != nil {
		return err
	}
	return d.launch("fast_head", "fast_head_mixture_merge", merge, r.mixture, sent.targetRows, r.losses[2], r.losses[3], n, tiles)
}

// fastFetch reads the results of rows lo..hi-1 back.
func (d *Device) fastFetch(h *heading, lo, hi int, r fastRooms) error {
	all, err := d.read(r.results, r.bytes)
	if err != nil {
		return err
	}
	k := h.K
	take := func(to []byte, from driver.Ptr) {
		if from != 0 {
			copy(to, all[from-r.results:])
		}
	}
	take(bytesOf(h.LSE[lo:hi]), r.lse)
	if k > 0 {
		take(bytesOf(h.TopIDs[lo*k:hi*k]), r.ids)
		take(bytesOf(h.TopLogits[lo*k:hi*k]), r.top)
	}
	if h.Labels != nil {
		take(bytesOf(h.LabelLogit[lo:hi]), r.labelLogit)
		take(bytesOf(h.LabelRank[lo:hi]), r.rank)
	}
	for i, to := range [][]float32{h.KL, h.RKL, h.JSD, h.TV} {
		if to != nil {
			take(bytesOf(to[lo:hi]), r.losses[i])
		}
	}
	return nil
}

// dense is m without gaps between rows, from 16 bytes on: itself, or a copy in
// scratch memory.
func (d *Device) dense(name string, m matrix) (matrix, error) {
	if m.stride == m.cols && m.at%16 == 0 {
		return m, nil
	}
	at, err := d.room(name, m.rows*m.cols*2)
	if err != nil {
		return matrix{}, err
	}
	out := matrix{at: at, rows: m.rows, cols: m.cols, stride: m.cols}
	return out, d.pack(operand(out), operand(m), m.cols)
}

// fastTargets lays one target state beside each draft row; a row without one
// gets the first, whose divergence the kernel then leaves out.
func (d *Device) fastTargets(h *heading, lo, hi int) (matrix, []int32, error) {
	rows := h.TargetRow[lo:hi]
	if h.target.rows == 0 {
		return d.rowRange(h.hidden, lo, hi), rows, nil
	}
	from := make([]int32, len(rows))
	for i, r := range rows {
		from[i] = max(r, 0)
	}
	out := matrix{rows: len(rows), cols: h.target.cols, stride: h.target.cols}
	var err error
	if out.at, err = d.room("fast target", out.rows*out.cols*2); err != nil {
		return matrix{}, nil, err
	}
	return out, rows, d.gather(out, h.target, from)
}

// fastSent is where the small arrays of a call are.
type fastSent struct {
	hidden, weight, target, labels, targetRows driver.Ptr
}

func (d *Device) fastParams(h *heading, lo, hi int, hidden, target matrix, targetRows []int32) (s fastSent, err error) {
	maps := [3][]byte{}
	for i, m := range []matrix{hidden, h.weight, target} {
		if i == 2 && h.Losses == 0 {
			continue
		}
		if maps[i], err = driver.TensorMap(operand(m), 64); err != nil {
			return s, err
		}
	}
	var labels []int32
	if h.Labels != nil {
		labels = h.Labels[lo:hi]
	}
	at, err := d.params.send(maps[0], maps[1], maps[2], bytesOf(labels), bytesOf(targetRows))
	if err != nil {
		return s, err
	}
	s = fastSent{hidden: at[0], weight: at[1], target: at[2]}
	if labels != nil {
		s.labels = at[3]
	}
	if targetRows != nil {
		s.targetRows = at[4]
	}
	return s, nil
}
