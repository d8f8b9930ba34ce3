package diagnose

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"math"
	"slices"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/schemas"
)

// copyDrift is how far a copy of the target's rows may be from them, as a
// share of their length: both may have been rounded to bf16.
const copyDrift = bf16Drift

// ownRows is a table of the drafter's own in place of the target's.
type ownRows struct {
	key, name, word string
	target          cuda.Tensor
	explains        []string // findings that a wrong table makes
}

// probeIdentity compares the embedding and head that a drafter carries with
// the target's, and drafts with either where they differ.
func probeIdentity(ctx context.Context, s *study, r *Report) error {
	for _, own := range []ownRows{
		{"own-embedding", "embed_tokens.weight", "embedding", s.Host.Embedding, []string{"slot-0", "mask-token"}},
		{"own-head", "lm_head.weight", "head", s.Host.Head, nil},
	} {
		f, err := s.ownTable(ctx, own)
		if err != nil {
			return err
		}
		r.Findings = append(r.Findings, f)
		if f.alarm() {
			r.explain(f.Key, own.explains...)
		}
	}
	return nil
}

func (s *study) ownTable(ctx context.Context, own ownRows) (Finding, error) {
	f := Finding{Key: own.key, Subject: OfDrafter, Hypothesis: "the drafter carries another " + own.word + " than the one it was trained with", weight: 5}
	f.Control = "rows that are a copy of the target's differ from them by rounding alone"
	name := tensorsOf(s.Drafter.Weights).names[own.name]
	if name == "" {
		f.Verdict = RuledOut
		f.Measure = "it carries no " + own.word
		f.Sentence = fmt.Sprintf("It drafts with the target's own %s.", own.word)
		return f, nil
	}
	vals, err := s.Drafter.Weights.Float32s(name)
	if err != nil {
		return f, fmt.Errorf("reading %s: %w", name, err)
	}
	var ids []int32 // of a head over fewer tokens
	if own.key == "own-head" {
		if ids, err = drafter.ReadVocabulary(s.Drafter.Weights, s.spec.DraftVocab, s.spec.Vocab); err != nil {
			return f, err
		}
	}
	rows := own.target.Rows
	if ids != nil {
		rows = len(ids)
	}
	if len(vals) != rows*own.target.Cols {
		f.Verdict, f.Needs, f.Sentence = CannotTell, "a target of the drafter's size", fmt.Sprintf("Its %s has %d values, the target's %d.", own.word, len(vals), rows*own.target.Cols)
		return f, nil
	}
	distance, words, err := s.rowsApart(vals, own.target, ids)
	if err != nil {
		return f, err
	}
	f.Measure = "its " + own.word + " has the hash " + words
	switch {
	case distance <= copyDrift:
		f.Verdict, f.Sentence = RuledOut, fmt.Sprintf("Its own %s is the target's.", own.word)
		return f, nil
	case s.declared == nil:
		f.Verdict, f.Needs, f.Sentence = CannotTell, "a capture of the states that it reads", fmt.Sprintf("Its own %s differs from the target's; which it was trained with shows only when it drafts.", own.word)
		return f, nil
	}
	return f, s.draftWithTargets(ctx, own, &f)
}

// draftWithTargets drafts with the target's table in place of the drafter's
// own. Weights draft best with the one that they were trained with.
func (s *study) draftWithTargets(ctx context.Context, own ownRows, f *Finding) error {
	rep, err := newReplica(s.spec, plainly{s.Drafter.Weights, own.name}, s.Host, s.Device)
	if err != nil {
		return err
	}
	defer rep.close()
	ms, err := s.scan(ctx, rep, []Graph{Declared(s.spec)}, variantSlots, false)
	if err != nil {
		return err
	}
	t := s.tried(variant{key: own.key}, s.declared, ms[0])
	f.Effect = &t.gain
	f.Measure += fmt.Sprintf("; with the target's in its place the mean 1/rank goes from %.3f to %.3f (%s), hits from %.3f to %.3f", t.a, t.b, t.gain.signed(), t.hits.a, t.hits.b)
	switch {
	case t.skilled && t.p < familyError/2 && t.gain.Value > relevance*t.a:
		f.Verdict = Supported
		if t.gain.Low > relevance*t.a {
			f.Verdict = Confirmed
		}
		f.Sentence = fmt.Sprintf("The %s that the drafter carries is not the one it was trained with: it drafts better with the target's. Leave %s out of its weights, or copy the target's.", own.word, own.name)
	case t.gain.High < 0:
		f.Verdict, f.Sentence = RuledOut, fmt.Sprintf("It carries an %s that is not the target's, and drafts better with it: it was trained so.", own.word)
	default:
		f.Verdict, f.Needs, f.Sentence = CannotTell, "more sequences", fmt.Sprintf("Its own %s differs from the target's, and it drafts about alike with either.", own.word)
	}
	return nil
}

// plainly hides a tensor of a checkpoint.
type plainly struct {
	drafter.Weights
	without string
}

func (p plainly) Names() []string {
	return slices.DeleteFunc(slices.Clone(p.Weights.Names()), func(name string) bool {
		return name == p.without || name == "model."+p.without
	})
}

// rowsAtOnce bounds the rows of a table that are read from the device.
const rowsAtOnce = 4096

// rowsApart is the distance of a table from the target's rows, as a share of
// the latter's length, and both in words. ids are the target's rows; nil is
// all of them.
func (s *study) rowsApart(vals []float32, target cuda.Tensor, ids []int32) (float64, string, error) {
	h := target.Cols
	n := len(vals) / h
	buf, err := s.Device.New(min(n, rowsAtOnce) * h)
	if err != nil {
		return 0, "", err
	}
	defer buf.Close()
	own, other := sha256.New(), sha256.New()
	var diff, ref float64
	equal := 0
	for lo := 0; lo < n; lo += rowsAtOnce {
		hi := min(lo+rowsAtOnce, n)
		part := target.RowRange(lo, min(hi, target.Rows))
		if ids != nil {
			part = cuda.Matrix(buf, hi-lo, h)
			if err := s.Device.GatherRows(part, target, ids[lo:hi]); err != nil {
				return 0, "", err
			}
		}
		theirs := make([]float32, (hi-lo)*h)
		if err := s.Device.Download(theirs, part); err != nil {
			return 0, "", err
		}
		for at := 0; at < len(theirs); at += h {
			a, b := vals[lo*h+at:lo*h+at+h], theirs[at:at+h]
			if slices.Equal(a, b) {
				equal++
			}
			for i, v := range b {
				d := float64(a[i]) - float64(v)
				diff += d * d
				ref += float64(v) * float64(v)
			}
		}
		own.Write(schemas.F32.AppendBytes(nil, vals[lo*h:hi*h]))
		other.Write(schemas.F32.AppendBytes(nil, theirs))
	}
	distance := math.Sqrt(diff / math.Max(ref, 1e-300))
	// The first 12 digits of the SHA-256 of the float32 bits, little-endian.
	short := func(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil))[:12] }
	return distance, fmt.Sprintf("%s, the target's rows %s: %d of %d rows equal, %.2g apart as a share of their length", short(own), short(other), equal, n, distance), nil
}
