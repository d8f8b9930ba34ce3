package main

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/data/similar"
	"github.com/draftscope/draftscope/drafter"
)

// headRows bounds the rows that go through the target's head at once.
const headRows = 512

// headComparison is what the target's head makes of the final states of two
// captures: p of A, q of B.
type headComparison struct {
	Positions int     `json:"positions"`
	Agreeing  int     `json:"agreeing"` // positions with equal argmax
	MeanKL    float64 `json:"mean_kl"`  // Σ p ln(p/q), nats
	MaxKL     float64 `json:"max_kl"`
	// Worst is where MaxKL is, Parting the first position with another argmax,
	// in the order of the sequences.
	Worst   *similar.Place `json:"worst,omitempty"`
	Parting *similar.Place `json:"parting,omitempty"`

	host drafter.Host
	dev  cuda.Device
}

// add puts the final states of one sequence of both captures through the head,
// as far as their ids are the same.
func (h *headComparison) add(x, y similar.Sequence) error {
	width := h.host.Hidden
	a, b := x.States[h.host.Layers], y.States[h.host.Layers]
	n := min(len(x.Tokens), len(y.Tokens), len(a)/width, len(b)/width)
	for t := range n {
		if x.Tokens[t].TokenID != y.Tokens[t].TokenID {
			n = t
			break
		}
	}
	for lo := 0; lo < n; lo += headRows {
		hi := min(lo+headRows, n)
		if err := h.tile(x.ID, lo, a[lo*width:hi*width], b[lo*width:hi*width]); err != nil {
			return fmt.Errorf("comparing the answers of sequence %s: %w", x.ID, err)
		}
	}
	return nil
}

func (h *headComparison) tile(id string, first int, a, b []float32) (err error) {
	n := len(a) / h.host.Hidden
	var normed [2]cuda.Tensor
	for i, vals := range [][]float32{a, b} {
		buf, err := h.dev.New(len(vals))
		if err != nil {
			return err
		}
		defer buf.Close()
		normed[i] = cuda.Matrix(buf, n, h.host.Hidden)
		if err := errors.Join(h.dev.Upload(normed[i], vals), h.dev.RMSNorm(normed[i], normed[i], h.host.FinalNorm, h.host.Eps, h.host.Gain)); err != nil {
			return err
		}
	}
	rows := make([]int32, n)
	for i := range rows {
		rows[i] = int32(i)
	}
	p, err := h.dev.Head(cuda.HeadArgs{Hidden: normed[0], Weight: h.host.Head, K: 1})
	if err != nil {
		return err
	}
	q, err := h.dev.Head(cuda.HeadArgs{Hidden: normed[1], Weight: h.host.Head, K: 1, Target: normed[0], TargetRow: rows, Losses: cuda.KL})
	if err != nil {
		return err
	}
	for i := range n {
		place := similar.Place{SeqID: id, Pos: first + i}
		h.Positions++
		kl := math.Max(float64(q.KL[i]), 0) // of equal rows it may round below
		h.MeanKL += (kl - h.MeanKL) / float64(h.Positions)
		if kl > h.MaxKL {
			h.MaxKL, h.Worst = kl, &place
		}
		if p.TopIDs[i] == q.TopIDs[i] {
			h.Agreeing++
		} else if h.Parting == nil {
			h.Parting = &place
		}
	}
	return nil
}

func (h *headComparison) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "through the target's head: the same argmax at %d of %d positions", h.Agreeing, h.Positions)
	if h.Parting != nil {
		fmt.Fprintf(&b, ", another first at %s, position %d", h.Parting.SeqID, h.Parting.Pos)
	}
	fmt.Fprintf(&b, "; KL mean %.3g, most %.3g nats", h.MeanKL, h.MaxKL)
	if h.Worst != nil {
		fmt.Fprintf(&b, " at %s, position %d", h.Worst.SeqID, h.Worst.Pos)
	}
	return b.String() + "\n"
}
