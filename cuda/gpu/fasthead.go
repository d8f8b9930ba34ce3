//go:build cuda && cgo

package gpu

import (
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
	return max(1, min(h.hidden.rows, headRows, fastParts/row/256*256))
}

// headFast is head without logits in memory.
func (d *Device) headFast(h *heading, lo, hi int) error {
	n, k, depth, vocab := hi-lo, h.K, h.weight.cols, h.weight.rows
	hidden, err := d.dense("fast hidden", d.rowRange(h.hidden, lo, hi))
	if err != nil {
		return err
	}
	if h.weight, err = d.dense("fast weight", h.weight); err != nil {
		return err
	}
	width, losses := fastWide, h.Losses != 0
	if losses {
		width = fastNarrow
	}
	tiles := ceil(vocab, width)
	at := map[string]driver.Ptr{}
	for name, bytes := range map[string]int{
		"draft": tiles * n * 8, "best": n * k * 8, "ranks": n * 4, "label logit": n * 4, "lse": n * 4, "ids": n * k * 4,
		"values": n * k * 4, "rank": n * 4, "target parts": flag(losses) * tiles * n * 16, "target lse": flag(losses) * n * 4,
		"losses": flag(losses) * 4 * n * 4, "mixture": flag(h.Losses&(cuda.JSD|cuda.TV) != 0) * tiles * n * 8,
	} {
		if bytes == 0 {
			continue
		}
		if at[name], err = d.room("fast "+name, bytes); err != nil {
			return err
		}
	}
	var target matrix
	var targetRows []int32
	if losses {
		if target, targetRows, err = d.fastTargets(h, lo, hi); err != nil {
			return err
		}
	}
	sent, err := d.fastParams(h, lo, hi, hidden, target, targetRows)
	if err != nil {
		return err
	}
	begin := driver.Grid{Blocks: [3]int{ceil(n, fastBeginRows)}, Threads: [3]int{128}, Shared: fastBeginShare}
	if err := d.launch("fast_head", "fast_head_begin", begin, hidden.at, h.weight.at, sent.labels, at["label logit"], at["best"], at["ranks"], n, depth, k); err != nil {
		return err
	}
	wide := driver.Grid{Blocks: [3]int{d.card.SMs / 2 * 2}, Threads: [3]int{fastThreads}, Shared: fastShared}
	if losses {
		err = d.launch("fast_head", "fast_head_both", wide, sent.hidden, sent.target, sent.weight, at["draft"], at["target parts"], at["best"], at["ranks"],
			sent.labels, at["label logit"], n, vocab, depth, k)
	} else {
		err = d.launch("fast_head", "fast_head", wide, sent.hidden, sent.weight, at["draft"], at["best"], at["ranks"],
			sent.labels, at["label logit"], n, vocab, depth, k)
	}
	if err != nil {
		return err
	}
	loss := func(i int) driver.Ptr { return at["losses"] + driver.Ptr(i*n*4) }
	merge := driver.Grid{Blocks: [3]int{ceil(n, fastMergeRows)}, Threads: [3]int{fastMergeRows, fastSlices}}
	kl, rkl := driver.Ptr(0), driver.Ptr(0)
	if losses {
		kl, rkl = loss(0), loss(1)
	}
	if err := d.launch("fast_head", "fast_head_merge", merge, at["draft"], at["target parts"], at["best"], at["ranks"], sent.labels, sent.targetRows,
		at["lse"], at["ids"], at["values"], at["rank"], at["target lse"], kl, rkl, n, tiles, k); err != nil {
		return err
	}
	if h.Losses&(cuda.JSD|cuda.TV) != 0 {
		if err := d.launch("fast_head", "fast_head_mixture", wide, sent.hidden, sent.target, sent.weight, at["mixture"], at["lse"], at["target lse"], n, vocab, depth); err != nil {
			return err
		}
		if err := d.launch("fast_head", "fast_head_mixture_merge", merge, at["mixture"], sent.targetRows, loss(2), loss(3), n, tiles); err != nil {
			return err
		}
	}
	list := []fetched{{bytesOf(h.LSE[lo:hi]), at["lse"]}}
	if k > 0 {
		list = append(list, fetched{bytesOf(h.TopIDs[lo*k : hi*k]), at["ids"]}, fetched{bytesOf(h.TopLogits[lo*k : hi*k]), at["values"]})
	}
	if h.Labels != nil {
		list = append(list, fetched{bytesOf(h.LabelLogit[lo:hi]), at["label logit"]}, fetched{bytesOf(h.LabelRank[lo:hi]), at["rank"]})
	}
	for i, to := range [][]float32{h.KL, h.RKL, h.JSD, h.TV} {
		if to != nil {
			list = append(list, fetched{bytesOf(to[lo:hi]), loss(i)})
		}
	}
	return d.fetch(list)
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
