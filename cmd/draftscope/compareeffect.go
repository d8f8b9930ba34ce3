package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/apache/arrow/go/v17/arrow"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/data/report"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/schemas"
)

// draftEffect is what the difference of two captures does to one drafter: its
// accept_len_macro by the chain on the states of A and of B.
type draftEffect struct {
	Drafter string `json:"drafter"`
	report.Difference
	// Parting is the first sequence, by name, whose rounds are not the same,
	// and the anchor of the first round that is not.
	Parting       string `json:"parting,omitempty"`
	PartingAnchor int32  `json:"parting_anchor,omitempty"`
	Same          int    `json:"same"` // sequences with equal rounds
	Of            int    `json:"of"`
}

// effects puts the given drafters on the states of both captures.
func (j *job) effects(ctx context.Context, a, b captureRef) ([]draftEffect, error) {
	var out []draftEffect
	for _, ref := range j.drafters {
		p, err := placeOf(ref.dir)
		if err != nil {
			return nil, err
		}
		var rounds [2]map[string][]schemas.Round
		for i, side := range []captureRef{a, b} {
			if rounds[i], err = j.roundsOn(ctx, side, ref.name, p); err != nil {
				return nil, fmt.Errorf("drafting with %s on %s: %w", ref.name, side.label, err)
			}
		}
		e, err := effectOf(ctx, ref.name, rounds)
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	return out, nil
}

// effectOf compares the rounds of the sequences that both have.
func effectOf(ctx context.Context, name string, rounds [2]map[string][]schemas.Round) (e draftEffect, err error) {
	var nums, dens [2][]float64
	same := func(x, y schemas.Round) bool { return x.Anchor == y.Anchor && x.Accepted == y.Accepted }
	for _, id := range slices.Sorted(maps.Keys(rounds[0])) {
		x := rounds[0][id]
		y, ok := rounds[1][id]
		if !ok {
			continue
		}
		e.Of++
		if slices.EqualFunc(x, y, same) {
			e.Same++
		} else if e.Parting == "" {
			e.Parting = id
			for i := range min(len(x), len(y)) {
				if e.PartingAnchor = x[i].Anchor; !same(x[i], y[i]) {
					break
				}
			}
		}
		for i, list := range [][]schemas.Round{x, y} {
			var sum, n float64
			for _, r := range list {
				if !r.Truncated {
					sum += float64(r.AcceptLen)
					n++
				}
			}
			if n > 0 {
				sum, n = sum/n, 1
			}
			nums[i], dens[i] = append(nums[i], sum), append(dens[i], n)
		}
	}
	d, err := report.Paired(ctx, nums[0], dens[0], nums[1], dens[1], report.Options{})
	d.Metric, d.Method = "accept_len_macro", schemas.MethodChain
	e.Drafter, e.Difference = name, d
	return e, err
}

// roundsOn simulates a drafter's rounds by the chain over a capture.
func (j *job) roundsOn(ctx context.Context, ref captureRef, name string, p place) (_ map[string][]schemas.Round, err error) {
	d, _, err := openDrafter(name, p, hostOf(j.model), j.dev)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	stage, err := drafter.NewStage(drafter.Config{Drafters: []*drafter.Drafter{d}, Host: hostOf(j.model), Device: j.dev, Anchors: drafter.Rounds})
	if err != nil {
		return nil, badInput(err)
	}
	defer stage.Close()
	ds, err := data.Open(ref.dir)
	if err != nil {
		return nil, dataError(err)
	}
	defer func() { err = errors.Join(err, ds.Close()) }()
	source, err := ds.Replay(ref.run.Name, data.ReplayConfig{})
	if err != nil {
		return nil, dataError(err)
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	out := map[string][]schemas.Round{}
	for {
		id, rec, last, err := source.Next(ctx)
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, dataError(err)
		}
		err = stage.Process(ctx, id, rec, nil)
		rec.Release()
		if err != nil {
			return nil, err
		}
		if !last {
			continue
		}
		err = stage.End(ctx, id, func(rec arrow.Record) error {
			env, err := schemas.EnvelopeOf(rec)
			if err != nil || env.Table != schemas.TableRounds {
				return err
			}
			rows, err := schemas.Rows[schemas.Round](rec)
			for _, r := range rows {
				if r.Method == schemas.MethodChain {
					out[id] = append(out[id], r)
				}
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
}

func (e draftEffect) String() string {
	if e.A == nil || e.B == nil {
		return fmt.Sprintf("drafter %s: no whole round on both\n", e.Drafter)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "drafter %s: %.3f tokens a round on the first, %.3f on the second (%+.3f", e.Drafter, *e.A, *e.B, *e.Difference.Difference.Value)
	if d := e.Difference.Difference; d.Low != nil {
		fmt.Fprintf(&b, ", 95 %% %+.3f to %+.3f", *d.Low, *d.High)
	}
	fmt.Fprintf(&b, "); the same rounds in %d of %d sequences", e.Same, e.Of)
	if e.Parting != "" {
		fmt.Fprintf(&b, ", others first at %s, anchor %d", e.Parting, e.PartingAnchor)
	}
	return b.String() + "\n"
}
