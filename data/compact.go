package data

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"slices"
	"time"

	"github.com/draftscope/draftscope/data/statefile"
	"github.com/draftscope/draftscope/schemas"
)

// CompactConfig says how far a run is compacted. The zero value is fine.
type CompactConfig struct {
	// TargetBytes is how large a file of states may become; 0 means 256 MiB.
	TargetBytes int64
	// Merged, when not nil, hears of each merge that is done.
	Merged func(Merge)
}

const defaultCompacted = 256 << 20

// Validate reports what of the config cannot be used.
func (c CompactConfig) Validate() error {
	if c.TargetBytes < 0 {
		return fmt.Errorf("files of %d bytes: want 0 or more", c.TargetBytes)
	}
	return nil
}

// Compaction says what Compact did.
type Compaction struct {
	Groups int   // that were replaced
	Into   int   // groups that replaced them
	Bytes  int64 // of states that were copied
}

// Compact joins the small commit groups of a run's captures into larger ones.
// The states are copied row group by row group, never decoded; rows of one
// state come together, sorted as they were within each old group. Sequences and
// their digests stay what they are, and every byte is compared with its
// digest before its old file goes.
//
// A crash at any time loses and doubles nothing: a journal names the groups
// that are being replaced, readers of this package leave them out as soon as
// the new group counts, and the next [Create] removes what is left of them.
// Only programs that list the Parquet files themselves see rows twice, from
// the new files' renaming to the old ones' removal. Sinks may work meanwhile.
// A [ReplaySource] that is open must be opened again: files that it was about
// to read may be gone.
func (d *Dataset) Compact(ctx context.Context, run string, cfg CompactConfig) (Compaction, error) {
	done, err := d.compact(ctx, run, cfg)
	if err != nil {
		return done, fmt.Errorf("compacting run %s: %w", run, err)
	}
	return done, nil
}

func (d *Dataset) compact(ctx context.Context, run string, cfg CompactConfig) (done Compaction, err error) {
	if !d.writable {
		return done, ErrReadOnly
	}
	if err := cfg.Validate(); err != nil {
		return done, err
	}
	d.compacting.Lock()
	defer d.compacting.Unlock()
	if err := d.recoverCompaction(); err != nil { // of a Compact that failed
		return done, err
	}
	batches, err := d.planCompaction(run, cmp.Or(cfg.TargetBytes, defaultCompacted))
	if err != nil {
		return done, err
	}
	for _, b := range batches {
		if err := ctx.Err(); err != nil {
			return done, err
		}
		n, err := d.compactBatch(ctx, run, b)
		if err != nil {
			return done, err
		}
		done.Groups += len(b)
		done.Into++
		done.Bytes += n
		if cfg.Merged != nil {
			cfg.Merged(mergeOf(b))
		}
	}
	return done, nil
}

// oldGroup is a commit group that may be joined to others.
type oldGroup struct {
	group
	marker  string
	stream  string
	created time.Time
	states  int64 // size of its states file
}

// planCompaction finds batches of at least two groups of one shard and stream,
// next to each other, whose states files take no more than target together.
func (d *Dataset) planCompaction(run string, target int64) (batches [][]oldGroup, err error) {
	markers, err := d.captureMarkers(run)
	if err != nil {
		return nil, err
	}
	var all []oldGroup
	for _, marker := range markers {
		g, ok := parseGroup(filepath.Base(marker))
		if !ok {
			continue // not ours
		}
		o, err := d.readOldGroup(marker, g)
		if err != nil {
			return nil, err
		}
		all = append(all, o)
	}
	compare := func(a, b oldGroup) int {
		return cmp.Or(cmp.Compare(a.shard, b.shard), a.created.Compare(b.created), cmp.Compare(a.stream, b.stream))
	}
	slices.SortFunc(all, func(a, b oldGroup) int {
		return cmp.Or(compare(a, b), cmp.Compare(a.span.first, b.span.first), cmp.Compare(a.span.last, b.span.last), cmp.Compare(a.again, b.again))
	})
	for lo := 0; lo < len(all); {
		hi, size := lo+1, all[lo].states
		for hi < len(all) && compare(all[lo], all[hi]) == 0 && size+all[hi].states <= target {
			size += all[hi].states
			hi++
		}
		if hi-lo > 1 {
			batches = append(batches, all[lo:hi])
		}
		lo = hi
	}
	return batches, nil
}

func (d *Dataset) readOldGroup(marker string, g group) (o oldGroup, err error) {
	o = oldGroup{group: g, marker: marker}
	m, err := openPart(marker)
	if err != nil {
		return o, err
	}
	defer m.Close()
	o.stream = m.kv(keyStream)
	if created := m.kv(keyCreated); created != "" {
		if o.created, err = time.Parse(time.RFC3339Nano, created); err != nil {
			return o, fmt.Errorf("reading %s: %w: the stream's creation: %w", marker, ErrDamaged, err)
		}
	}
	var files []groupFile
	if err := json.Unmarshal([]byte(m.kv(keyGroup)), &files); err != nil || len(files) == 0 {
		return o, fmt.Errorf("reading %s: %w: its list of files", marker, ErrDamaged)
	}
	o.states = files[0].Size
	return o, nil
}

// compactBatch writes one group that holds what the old ones do, and removes
// them. It returns how many bytes of states were copied.
func (d *Dataset) compactBatch(ctx context.Context, run string, old []oldGroup) (n int64, err error) {
	s, err := d.newSink(run, old[0].shard, SinkConfig{Stream: old[0].stream, StreamCreated: old[0].created})
	if err != nil {
		return 0, err
	}
	var (
		sp        span
		list      []storedSeq
		tokens    []schemas.Token
		sequences []schemas.Sequence
		j         = journal{Run: run}
	)
	for _, o := range old {
		seqs, err := d.readMarker(o.marker)
		if err != nil {
			return 0, err
		}
		rows, err := readRows[schemas.Sequence](o.marker)
		if err != nil {
			return 0, err
		}
		toks, err := readRows[schemas.Token](o.capturePaths(d.dir, run)[1])
		if err != nil {
			return 0, err
		}
		list, sequences, tokens = append(list, seqs...), append(sequences, rows...), append(tokens, toks...)
		sp.add(o.span.first)
		sp.add(o.span.last)
		j.Old = append(j.Old, filepath.Base(o.marker))
		n += o.states
	}
	g, release := d.reserve(s.shard, sp, func(g group) []string { return g.capturePaths(d.dir, run) })
	defer release()
	paths := g.capturePaths(d.dir, run)
	j.New = filepath.Base(paths[2])
	var parts []part
	published := false
	defer func() {
		if !published {
			s.discard(parts)
		}
	}()
	p, err := s.spliceStates(ctx, paths[0], sp, list, old)
	if err != nil {
		return 0, err
	}
	parts = append(parts, p)
	if p.rows != int64(len(tokens))*int64(len(s.run.States)) {
		return 0, fmt.Errorf("reading the states of %d groups: %w: %d rows, want %d tokens of %d states", len(old), ErrDamaged, p.rows, len(tokens), len(s.run.States))
	}
	if p, err = writeSmall(&s, paths[1], schemas.TableTokens, "", sp, list, nil, tokens); err != nil {
		return 0, err
	}
	parts = append(parts, p)
	if p, err = writeSmall(&s, paths[2], schemas.TableSequences, "", sp, list, parts, sequences); err != nil {
		return 0, err
	}
	parts = append(parts, p)
	b, err := json.Marshal(j)
	if err != nil {
		return 0, err
	}
	if err := replaceFile(d.disk, filepath.Join(d.dir, journalName), b); err != nil {
		return 0, err
	}
	published = true // publish removes what it does not rename
	if err := publish(d.disk, parts); err != nil {
		return 0, errors.Join(err, d.removeJournal())
	}
	if err := d.removeOld(j); err != nil {
		return 0, err
	}
	return n, d.removeJournal()
}

// spliceStates writes the states of old groups into one file, state after
// state, and within a state group after group.
func (s *sink) spliceStates(ctx context.Context, path string, sp span, list []storedSeq, old []oldGroup) (part, error) {
	rounded := s.run.noErrors()
	var sources []*openedPart
	defer func() {
		for _, o := range sources {
			o.Close()
		}
	}()
	for _, g := range old {
		o, err := openPart(g.statesPath(s.d.dir, s.run.Name))
		if err != nil {
			return part{}, err
		}
		sources = append(sources, o)
		if err := o.verifyBody(); err != nil {
			return part{}, err
		}
		if s.run.Rounding == Lossless {
			continue
		}
		lost, err := o.roundingErrors(s.run.States)
		if err != nil {
			return part{}, err
		}
		addErrors(rounded, lost)
	}
	f, err := s.statesFooter(sp, list, rounded)
	if err != nil {
		return part{}, err
	}
	open := func(out io.Writer) (*statefile.Splicer, error) { return statefile.NewSplicer(out), nil }
	return writePart(s.d.disk, path, f, open, func(w *statefile.Splicer) error {
		next := make([]int, len(sources)) // row group of each source
		for i := range s.run.States {
			for k, o := range sources {
				if err := ctx.Err(); err != nil {
					return err
				}
				src := statefile.Source{ReaderAt: o.file, Size: o.size, Metadata: o.Metadata()}
				left := o.NumRows() / int64(len(s.run.States)) // of this state
				if i == len(s.run.States)-1 {
					left = math.MaxInt64 // and whatever else there is
				}
				for ; left > 0 && next[k] < len(src.Metadata.RowGroups); next[k]++ {
					rows := src.Metadata.RowGroups[next[k]].NumRows
					if left -= rows; left < 0 || rows < 1 {
						return fmt.Errorf("reading %s: %w: row group %d has %d rows, of more than one state", o.path, ErrDamaged, next[k], rows)
					}
					if err := w.Append(src, next[k]); err != nil {
						return fmt.Errorf("reading %s: %w", o.path, err)
					}
				}
			}
		}
		return nil
	})
}
