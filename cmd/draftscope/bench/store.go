package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/pipeline"
	"github.com/draftscope/draftscope/schemas"
	"github.com/parquet-go/parquet-go"
)

// commitBytes is how much a sink holds before it makes a file.
const commitBytes = 32 << 20

func (b *bench) datasetDir() string { return filepath.Join(b.work, "dataset") }

// dataset makes an empty dataset for the run.
func (b *bench) dataset() (*data.Dataset, error) {
	if err := os.RemoveAll(b.datasetDir()); err != nil {
		return nil, fmt.Errorf("clearing the last dataset: %w", err)
	}
	ds, err := data.Create(b.datasetDir(), b.cfg.Logger)
	if err != nil {
		return nil, err
	}
	spec := b.pool.shape.spec()
	err = ds.AddRun(data.Run{Name: runName, Target: "synthetic", States: spec.States, Layers: spec.Layers, Hidden: spec.Hidden, DType: spec.DType, FinalNorm: "pre", Engine: "bench"})
	if err != nil {
		return nil, errors.Join(err, ds.Close())
	}
	return ds, nil
}

// store writes sequences into a dataset: synced, verified, renamed.
func (b *bench) store(ctx context.Context) (n int64, err error) {
	ds, err := b.dataset()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, ds.Close()) }()
	sink, err := ds.CaptureSink(runName, 0, data.SinkConfig{})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, sink.Close()) }()
	b.clock.start()
	defer b.clock.stop()
	src := &source{pool: b.pool, seqs: b.sequences(b.cfg.Bytes)}
	for streamSeq := uint64(1); ; streamSeq++ {
		seq, rec, last, err := src.Next(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		err = sink.Write(ctx, seq, rec)
		rec.Release()
		if err == nil && last {
			n += recordsPerSeq * b.pool.recordBytes()
			err = sink.End(ctx, seq, streamSeq)
			if err == nil && sink.Pending() >= commitBytes {
				err = sink.Commit(ctx)
			}
		}
		if err != nil {
			return n, err
		}
	}
	return n, sink.Commit(ctx)
}

// back replays what store wrote.
func (b *bench) back(ctx context.Context) (n int64, err error) {
	if _, err := os.Stat(b.datasetDir()); err != nil {
		if _, err := b.store(ctx); err != nil {
			return 0, err
		}
	}
	b.clock.start()
	defer b.clock.stop()
	ds, err := data.Open(b.datasetDir())
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, ds.Close()) }()
	src, err := ds.Replay(runName, data.ReplayConfig{})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	rows := int64(0)
	for {
		_, rec, last, err := src.Next(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return n, err
		}
		if !last {
			rows += rec.NumRows()
		}
		rec.Release()
	}
	b.stored, err = folderBytes(b.datasetDir())
	b.storedRaw = rows * int64(b.pool.shape.tokenBytes())
	return b.storedRaw, err
}

func folderBytes(dir string) (n int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			n += info.Size()
		}
		return err
	})
	return n, err
}

// plane is everything: source, stream, and a synced, renamed file before the
// ack. With a drafter the states are read a second time.
func (b *bench) plane(stage pipeline.NewStage) func(context.Context) (int64, error) {
	return func(ctx context.Context) (n int64, err error) {
		ds, err := b.dataset()
		if err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, ds.Close()) }()
		return b.through(ctx, b.sequences(b.cfg.Bytes), pipeline.Embedded, stage, func(stream string, partition int) (pipeline.Sink, error) {
			if stream == pipeline.ResultsStream {
				return &dropSink{}, nil
			}
			return ds.CaptureSink(runName, partition, data.SinkConfig{})
		})
	}
}

// planeStock is the plane with files as parquet-go writes them when it is
// asked for byte-stream split and zstd. It is slow: a quarter of the volume
// has to do.
func (b *bench) planeStock(ctx context.Context) (int64, error) {
	dir := filepath.Join(b.work, "stock")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return 0, fmt.Errorf("making the stock writer's folder: %w", err)
	}
	return b.through(ctx, b.sequences(b.cfg.Bytes/4), pipeline.Embedded, nil, func(_ string, partition int) (pipeline.Sink, error) {
		return &stockSink{dir: dir, prefix: strconv.Itoa(partition) + "-"}, nil
	})
}

// stockRow is a row of the table states, all columns as stock parquet-go
// compresses them.
type stockRow struct {
	SeqID string    `parquet:"seq_id,dict,zstd"`
	Pos   int32     `parquet:"pos,delta,zstd"`
	State int32     `parquet:"state,zstd"`
	Vec   []float32 `parquet:"vec,list" parquet-element:",split,zstd"`
}

// stockSink writes files with parquet-go alone. It syncs and renames like the
// real sink, and checks nothing.
type stockSink struct {
	dir, prefix string
	made        int
	held        []arrow.Record
	pending     int64
}

func (s *stockSink) Write(_ context.Context, _ string, rec arrow.Record) error {
	env, err := schemas.EnvelopeOf(rec)
	if err != nil || env.Table != schemas.TableCapture {
		return err
	}
	rec.Retain()
	s.held = append(s.held, rec)
	c, err := schemas.ReadCapture(rec)
	for _, raw := range c.States {
		s.pending += int64(len(raw))
	}
	return err
}

func (s *stockSink) End(context.Context, string, uint64) error { return nil }
func (s *stockSink) Drop(string)                               {}
func (s *stockSink) Pending() int64                            { return s.pending }

func (s *stockSink) Commit(context.Context) (err error) {
	s.made++
	name := filepath.Join(s.dir, s.prefix+strconv.Itoa(s.made)+".parquet")
	f, err := os.Create(name + ".tmp")
	if err != nil {
		return fmt.Errorf("writing with the stock writer: %w", err)
	}
	buf := bufio.NewWriterSize(f, 128<<10)
	w := parquet.NewGenericWriter[stockRow](buf, parquet.SkipPageBounds("vec", "list", "element"))
	for _, rec := range s.held {
		if err = s.rows(w, rec); err != nil {
			break
		}
	}
	err = errors.Join(err, w.Close(), buf.Flush(), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(name+".tmp", name)
	}
	if err == nil {
		err = syncDir(s.dir)
	}
	if err != nil {
		return fmt.Errorf("writing with the stock writer: %w", err)
	}
	return s.Close()
}

// rows writes one record, a state after the other, each a row group at most.
func (s *stockSink) rows(w *parquet.GenericWriter[stockRow], rec arrow.Record) error {
	c, err := schemas.ReadCapture(rec)
	if err != nil {
		return err
	}
	var vals []float32
	for i, raw := range c.States {
		vals = c.Spec.DType.AppendFloats(vals[:0], raw)
		rows := make([]stockRow, len(c.Tokens))
		for r, t := range c.Tokens {
			rows[r] = stockRow{t.SeqID, t.Pos, int32(c.Spec.States[i]), vals[r*c.Spec.Hidden : (r+1)*c.Spec.Hidden]}
		}
		if _, err := w.Write(rows); err != nil {
			return err
		}
	}
	return w.Flush()
}

func (s *stockSink) Close() error {
	for _, rec := range s.held {
		rec.Release()
	}
	s.held, s.pending = nil, 0
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
