package main

import (
	"context"
	"errors"
	"io"
	"sync"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/data/similar"
)

// comparePassBytes bounds the states, as float32, that wait for their other
// half while two captures are compared.
const comparePassBytes = 1 << 30

// eachPair calls use for every sequence that both captures have, and counts
// those that only one has. Both captures are read in step, each by a goroutine
// that is at most two sequences ahead. Where their orders differ, what comes
// early waits, up to limit bytes of states; what would be more is left for
// another pass over the files.
func eachPair(ctx context.Context, a, b captureRef, limit int64, use func(x, y similar.Sequence) error) (onlyA, onlyB int, err error) {
	p := pairing{refs: [2]captureRef{a, b}, limit: limit, use: use, left: map[string]int64{}}
	var ids [2]map[string]string
	for i, ref := range p.refs {
		if ids[i], err = storedIDs(ref); err != nil {
			return 0, 0, err
		}
	}
	want := map[string]bool{}
	for id := range ids[0] {
		if _, ok := ids[1][id]; ok {
			want[id] = true
		}
	}
	onlyA, onlyB = len(ids[0])-len(want), len(ids[1])-len(want)
	for ; len(want) > 0; want = p.next() {
		if err := p.pass(ctx, want); err != nil {
			return onlyA, onlyB, err
		}
	}
	return onlyA, onlyB, nil
}

// storedIDs are the sequences of a capture.
func storedIDs(ref captureRef) (_ map[string]string, err error) {
	ds, err := data.Open(ref.dir)
	if err != nil {
		return nil, dataError(err)
	}
	defer func() { err = errors.Join(err, ds.Close()) }()
	ids, err := ds.Stored(ref.run.Name)
	return ids, dataError(err)
}

// pairing is the state of [eachPair].
type pairing struct {
	refs  [2]captureRef
	limit int64
	use   func(x, y similar.Sequence) error
	left  map[string]int64 // for another pass, with the bytes of states
}

// next takes of what is left as much as may wait at once, and one sequence at
// least.
func (p *pairing) next() map[string]bool {
	want, sum := map[string]bool{}, int64(0)
	for id, size := range p.left {
		if sum += size; len(want) > 0 && sum > p.limit {
			break
		}
		want[id] = true
		delete(p.left, id)
	}
	return want
}

// pass reads both captures once, for the sequences that are wanted.
func (p *pairing) pass(ctx context.Context, want map[string]bool) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	var going sync.WaitGroup
	defer going.Wait()
	defer cancel()
	var sides [2]chan read
	for i, ref := range p.refs {
		source, err := readSequences(ref, func(id string) bool { return want[id] })
		if err != nil {
			return err
		}
		sides[i] = make(chan read, 1)
		going.Go(func() {
			defer close(sides[i])
			for {
				q, err := source.next(ctx)
				if errors.Is(err, io.EOF) {
					err = nil
					q.ID = ""
				}
				if q.ID == "" {
					err = errors.Join(err, source.close())
				}
				select {
				case sides[i] <- read{q, err}:
				case <-ctx.Done():
					if q.ID != "" {
						_ = source.close() // the error that ended it is told
					}
					return
				}
				if q.ID == "" {
					return
				}
			}
		})
	}
	return p.join(sides)
}

type read struct {
	q   similar.Sequence // ID is "" at the end, or with an error
	err error
}

// join meets the sequences of both sides.
func (p *pairing) join(sides [2]chan read) error {
	waiting := [2]map[string]similar.Sequence{{}, {}}
	var held int64
	var taken [2]int
	done := [2]bool{}
	for !done[0] || !done[1] {
		side := 0
		if done[0] || !done[1] && taken[1] < taken[0] {
			side = 1
		}
		r := <-sides[side]
		taken[side]++
		id, size := r.q.ID, bytesOf(r.q)
		_, passed := p.left[id]
		other, met := waiting[1-side][id]
		switch {
		case r.err != nil:
			return r.err
		case id == "":
			done[side] = true
		case passed: // its other half was left for another pass
		case met:
			delete(waiting[1-side], id)
			held -= bytesOf(other)
			pair := [2]similar.Sequence{}
			pair[side], pair[1-side] = r.q, other
			if err := p.use(pair[0], pair[1]); err != nil {
				return err
			}
		case held > 0 && held+size > p.limit:
			p.left[id] = size
		default:
			waiting[side][id] = r.q
			held += size
		}
	}
	return nil
}

func bytesOf(q similar.Sequence) (n int64) {
	for _, v := range q.States {
		n += int64(4 * len(v))
	}
	return n
}

// sequenceReader yields a run's sequences whole.
type sequenceReader struct {
	ds     *data.Dataset
	run    data.Run
	source *data.ReplaySource
}

func readSequences(ref captureRef, want func(id string) bool) (*sequenceReader, error) {
	ds, err := data.Open(ref.dir)
	if err != nil {
		return nil, dataError(err)
	}
	source, err := ds.Replay(ref.run.Name, data.ReplayConfig{Want: want})
	if err != nil {
		return nil, errors.Join(dataError(err), ds.Close())
	}
	return &sequenceReader{ds, ref.run, source}, nil
}

// next is the next sequence; the error is io.EOF at the end.
func (r *sequenceReader) next(ctx context.Context) (similar.Sequence, error) {
	stored, err := r.source.Sequence(ctx)
	switch {
	case errors.Is(err, io.EOF):
		return similar.Sequence{}, io.EOF
	case err != nil:
		return similar.Sequence{}, dataError(err)
	}
	q := similar.Sequence{ID: stored.SeqID, Tokens: stored.Tokens, States: make(map[int][]float32, len(stored.States))}
	for i, raw := range stored.States {
		vals := make([]float32, 0, len(raw)/r.run.DType.Size())
		q.States[r.run.States[i]] = r.run.DType.AppendFloats(vals, raw)
		stored.States[i] = nil // the collector may have it
	}
	return q, nil
}

func (r *sequenceReader) close() error { return errors.Join(r.source.Close(), r.ds.Close()) }
