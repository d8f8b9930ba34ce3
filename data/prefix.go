package data

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/draftscope/draftscope/schemas"
)

// Prefixes finds stored sequences by their first tokens, and reads the rows of
// these. It holds the token ids of the files that were written last, and reads
// states only when it is asked for them. Its methods may be called from several
// goroutines.
type Prefixes struct {
	d     *Dataset
	own   Run
	runs  []Run
	bound int64         // bytes of ids
	reads chan struct{} // as many as may read states at once

	mu     sync.Mutex
	parts  []*prefixPart // the latest first
	seen   map[string]bool
	times  map[string]time.Time // of folders, when they were listed
	faulty map[string]bool      // sequences by run and name
}

// prefixPart are the sequences of one commit of a capture, ordered by ids.
type prefixPart struct {
	run     Run
	marker  string
	written time.Time
	bytes   int64 // of ids; -1 until they are read
	seqs    []prefixSeq
}

type prefixSeq struct {
	id  string
	ids []int32
}

// Prefixes makes an index of the sequences whose rows a run could have: its
// own, and those of the runs that fit and record at least its states in its
// dtype. A run whose states are rounded has none. The index takes at most
// bound bytes, four a token, for the files that were written last. It is made
// by [Prefixes.Index], or when it is asked.
func (d *Dataset) Prefixes(run string, bound int64, fit func(Run) bool) (*Prefixes, error) {
	own, err := d.Run(run)
	if err != nil {
		return nil, fmt.Errorf("indexing prefixes for run %s: %w", run, err)
	}
	p := &Prefixes{d: d, own: own, bound: bound, reads: make(chan struct{}, runtime.GOMAXPROCS(0)), seen: map[string]bool{}, times: map[string]time.Time{}, faulty: map[string]bool{}}
	for _, r := range d.Runs() {
		if own.hasRowsOf(r) && (r.Name == run || fit(r)) {
			p.runs = append(p.runs, r)
		}
	}
	return p, nil
}

// hasRowsOf says that rows of other are as r would store them.
func (r Run) hasRowsOf(other Run) bool {
	return r.Rounding == Lossless && other.Rounding == Lossless && other.DType == r.DType && other.Hidden == r.Hidden &&
		other.Layers == r.Layers && other.FinalNorm == r.FinalNorm &&
		!slices.ContainsFunc(r.States, func(c int) bool { return !slices.Contains(other.States, c) })
}

// Prefix returns the rows of a sequence that begins with ids and that accept
// takes: for each state of the run a raw matrix [len(ids), hidden], bit-equal
// to what is stored, and the sequence's run and name. Without one the name is
// empty. The sequence is read whole and compared with its digest; one that is
// damaged is passed over and logged, and one with a fault is not taken.
func (p *Prefixes) Prefix(ctx context.Context, ids []int32, accept func(run, seq string) bool) (run, seq string, states [][]byte, err error) {
	for {
		part, seq, err := p.find(ctx, ids, accept)
		if part == nil {
			return "", "", nil, err
		}
		states, err := p.read(ctx, part, seq, ids)
		if err == nil {
			return part.run.Name, seq, states, nil
		}
		if ctx.Err() != nil {
			return "", "", nil, ctx.Err()
		}
		p.d.log.Warn("a stored prefix was passed over", "run", part.run.Name, "sequence", seq, "reason", err)
		p.mu.Lock()
		part.seqs = slices.DeleteFunc(part.seqs, func(s prefixSeq) bool { return s.id == seq })
		p.mu.Unlock()
	}
}

// Index reads what is stored now, which may take seconds, so that the first
// who asks need not wait for it.
func (p *Prefixes) Index(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.update(ctx, p.scanFaults, p.scan)
}

func (p *Prefixes) update(ctx context.Context, scans ...func(context.Context) error) error {
	for _, scan := range scans {
		if err := scan(ctx); err != nil {
			clear(p.times)
			return fmt.Errorf("indexing the prefixes in %s: %w", p.d.dir, err)
		}
	}
	return nil
}

// find returns a sequence that begins with ids, and its commit, nil without.
// It lists what is new only when what it knows has none.
func (p *Prefixes) find(ctx context.Context, ids []int32, accept func(run, seq string) bool) (*prefixPart, string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, scan := range []func(context.Context) error{p.scanFaults, p.scan} {
		if err := p.update(ctx, scan); err != nil {
			return nil, "", err
		}
		if part, seq := p.known(ids, accept); part != nil {
			return part, seq, nil
		}
	}
	return nil, "", nil
}

func (p *Prefixes) known(ids []int32, accept func(run, seq string) bool) (*prefixPart, string) {
	for _, part := range p.parts {
		i, _ := slices.BinarySearchFunc(part.seqs, ids, func(s prefixSeq, ids []int32) int { return slices.Compare(s.ids, ids) })
		for ; i < len(part.seqs); i++ {
			s := part.seqs[i]
			if len(s.ids) < len(ids) || !slices.Equal(s.ids[:len(ids)], ids) {
				break
			}
			if !p.faulty[faultyKey(part.run.Name, s.id)] && accept(part.run.Name, s.id) {
				return part, s.id
			}
		}
	}
	return nil, ""
}

func faultyKey(run, seq string) string { return run + "\x00" + seq }

// changed says whether a folder may have other files than when it was listed
// last. A change within the time stamp's grain does not show, so that a young
// stamp is not believed.
func (p *Prefixes) changed(dir string) bool {
	info, err := os.Stat(dir)
	if err != nil {
		return false // nothing was stored yet
	}
	at := info.ModTime()
	if p.times[dir].Equal(at) {
		return false
	}
	if time.Since(at) > time.Second {
		p.times[dir] = at
	}
	return true
}

// scanFaults notes the sequences of new files of the table faults.
func (p *Prefixes) scanFaults(ctx context.Context) error {
	for _, r := range p.runs {
		dir := runDir(p.d.dir, schemas.TableFaults, r.Name)
		if !p.changed(dir) {
			continue
		}
		paths, err := partsIn(dir)
		if err != nil {
			return err
		}
		for _, path := range paths {
			if p.seen[path] {
				continue
			}
			if err := ctx.Err(); err != nil {
				return err
			}
			rows, err := readRows[schemas.Fault](path)
			if err != nil {
				return err
			}
			for _, f := range rows {
				p.faulty[faultyKey(r.Name, f.SeqID)] = true
			}
			p.seen[path] = true
		}
	}
	return nil
}

// scan indexes the commits that are new, and forgets the oldest for them.
func (p *Prefixes) scan(ctx context.Context) error {
	for _, r := range p.runs {
		if !p.changed(runDir(p.d.dir, schemas.TableSequences, r.Name)) {
			continue
		}
		markers, err := p.d.captureMarkers(r.Name)
		if err != nil {
			return err
		}
		for _, marker := range markers {
			if p.seen[marker] {
				continue
			}
			info, err := os.Stat(marker)
			if err != nil {
				return err
			}
			p.seen[marker] = true
			p.parts = append(p.parts, &prefixPart{run: r, marker: marker, written: info.ModTime(), bytes: -1})
		}
	}
	if !slices.ContainsFunc(p.parts, func(part *prefixPart) bool { return part.bytes < 0 }) {
		return nil
	}
	slices.SortFunc(p.parts, func(a, b *prefixPart) int {
		return cmp.Or(b.written.Compare(a.written), strings.Compare(b.marker, a.marker))
	})
	var used int64
	for i, part := range p.parts {
		if part.bytes < 0 {
			if err := ctx.Err(); err != nil {
				return err // the next scan goes on
			}
			if err := part.index(p.d); err != nil {
				p.d.log.Warn("the prefixes of a file are not known", "reason", err)
			}
		}
		if used += part.bytes; used > p.bound {
			clear(p.parts[i:])
			p.parts = p.parts[:i]
			return nil
		}
	}
	return nil
}

// index reads the ids of a commit's sequences.
func (p *prefixPart) index(d *Dataset) error {
	p.bytes = 0
	// Of the tables, the columns that are needed.
	type sequence struct {
		SeqID  string `parquet:"seq_id"`
		Length int32  `parquet:"length"`
	}
	type token struct {
		ID int32 `parquet:"token_id"`
	}
	err := eachInPart(d, p.run.Name, p.marker, func(s sequence) int32 { return s.Length }, func(s sequence, tokens []token) error {
		ids := make([]int32, len(tokens))
		for i, t := range tokens {
			ids[i] = t.ID
		}
		p.seqs = append(p.seqs, prefixSeq{s.SeqID, ids})
		p.bytes += 4 * int64(len(ids))
		return nil
	})
	slices.SortFunc(p.seqs, func(a, b prefixSeq) int { return slices.Compare(a.ids, b.ids) })
	return err
}

// read reads the first rows of a sequence.
func (p *Prefixes) read(ctx context.Context, part *prefixPart, seq string, ids []int32) ([][]byte, error) {
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case p.reads <- struct{}{}:
		defer func() { <-p.reads }()
	}
	r, _, err := openReplayPart(p.d.dir, part.run, part.marker)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	for !r.done() && r.sequences[0].SeqID != seq {
		r.skip()
	}
	if r.done() {
		return nil, fmt.Errorf("reading %s: %w: sequence %s is not there any more", part.marker, ErrDamaged, seq)
	}
	return r.readFirst(ctx, ids, p.own.States)
}

// firstPiece is how many rows readFirst holds besides those that it returns.
const firstPiece = 256

// readFirst returns, for each of the states, the raw rows of the next
// sequence's first tokens, which must be ids, and moves past the sequence.
func (p *replayPart) readFirst(ctx context.Context, ids []int32, states []int) ([][]byte, error) {
	seq, at := p.sequences[0], p.at
	p.skip()
	tokens := p.tokens[at:p.at]
	for i, id := range ids {
		if i >= len(tokens) || tokens[i].TokenID != id {
			return nil, fmt.Errorf("%w: sequence %s has other tokens than it had", ErrDamaged, seq.SeqID)
		}
	}
	first := make([][]byte, len(states))
	var hashes []*xxhash.Digest
	for i, cur := range p.cursors {
		h := xxhash.New()
		width := p.run.Hidden * p.run.DType.Size()
		slot := slices.Index(states, p.run.States[i])
		if slot >= 0 {
			first[slot] = make([]byte, 0, len(ids)*width)
		}
		for lo := 0; lo < len(tokens); lo += firstPiece {
			var raw []byte
			err := guard(func() (err error) {
				raw, err = cur.rows(int64(i)*p.total+at+int64(lo), min(firstPiece, len(tokens)-lo))
				return err
			})
			if err == nil {
				err = ctx.Err()
			}
			if err != nil {
				return nil, fmt.Errorf("reading state %d in %s: %w", p.run.States[i], p.states.path, err)
			}
			h.Write(raw)
			if slot >= 0 && lo < len(ids) {
				first[slot] = append(first[slot], raw[:min(len(raw), (len(ids)-lo)*width)]...)
			}
		}
		hashes = append(hashes, h)
	}
	return first, p.checkDigest(seq, tokens, hashes)
}
