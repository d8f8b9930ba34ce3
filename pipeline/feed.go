package pipeline

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/apache/arrow/go/v17/arrow"
)

// feed publishes what the source gives until it has no more, or until it is
// told to drain and the sequence at hand is through. At the end it says so on
// every partition.
func (v *invocation) feed(ctx context.Context, src Source, out *publisher) (drained bool, err error) {
	between, cancel := context.WithCancel(ctx) // cancelled when draining
	defer cancel()
	stopped := make(chan struct{})
	defer func() { cancel(); <-stopped }()
	go func() {
		defer close(stopped)
		select {
		case <-v.cfg.Drain:
			cancel()
		case <-between.Done():
		}
	}()

	sheds := v.cfg.WhenFull == Shed && out.quota != nil
	if sheds {
		out.quota.patience = shedPatience
	}
	ended := make([]int64, v.partitions)
	var open *begun
	var shedding string // the sequence that is being dropped
	for {
		ask := ctx
		if open == nil {
			ask = between
			select {
			case <-v.cfg.Drain:
				cancel() // the goroutine may not have come to it
			default:
			}
			if between.Err() != nil {
				break
			}
		}
		seq, rec, last, err := src.Next(ask)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			if open == nil && between.Err() != nil && ctx.Err() == nil && errors.Is(err, context.Canceled) {
				break
			}
			return false, fmt.Errorf("reading the source: %w", err)
		}
		if open == nil && shedding == "" && sheds {
			full, err := out.quota.crowded(ctx)
			if err != nil {
				return false, err
			}
			if full {
				shedding = seq
			}
		}
		if shedding != "" {
			err = v.shed(ctx, &shedding, seq, rec, last)
		} else {
			open, err = v.publish(ctx, out, open, seq, rec, last, ended)
			if errors.Is(err, errFull) {
				if err = out.giveUp(ctx, open.outSeq); err == nil {
					v.progress.shedRows.Add(open.rows)
					shedding, open = seq, nil
					err = v.shed(ctx, &shedding, seq, rec, last)
				}
			}
		}
		if rec != nil {
			rec.Release()
		}
		if err != nil {
			return false, err
		}
	}
	if err := ctx.Err(); err != nil {
		return false, context.Cause(ctx)
	}
	if open != nil {
		return false, fmt.Errorf("%w: it ended in the middle of sequence %q", ErrOrder, open.seq)
	}
	for p, n := range ended {
		if err := out.control(ctx, kindEndOfRun, v.nonce, p, n); err != nil {
			return false, err
		}
	}
	return between.Err() != nil, out.flush(ctx)
}

// shed drops one record of the source, and counts its sequence after the last.
func (v *invocation) shed(ctx context.Context, shedding *string, seq string, rec arrow.Record, last bool) error {
	if seq != *shedding {
		return fmt.Errorf("%w: sequence %q came before the last record of %q", ErrOrder, seq, *shedding)
	}
	if rec != nil {
		v.progress.shedRows.Add(rec.NumRows())
	}
	if !last {
		return nil
	}
	*shedding = ""
	n := shedNote{Sequences: v.progress.shed.Add(1), Rows: v.progress.shedRows.Load()}
	v.log.Warn("the stream is full, a sequence was dropped", "sequence", seq, "so_far", n.Sequences)
	if err := v.noteShed(ctx, v.nonce, n); err != nil {
		v.log.Warn("what was dropped could not be noted in the server; the next note will say it", "error", err)
	}
	return nil
}

// begun is a sequence that is being published, and what has been of it.
type begun struct {
	*outSeq
	rows, payload int64
}

// publish sends one record of the source, and the end marker after the last.
// It returns the sequence that is open afterwards. One that may still be given
// up is counted when it is whole, others as they come.
func (v *invocation) publish(ctx context.Context, out *publisher, open *begun, seq string, rec arrow.Record, last bool, ended []int64) (*begun, error) {
	if err := checkSeqID(seq); err != nil {
		return open, fmt.Errorf("%w: %w", ErrOrder, err)
	}
	if open != nil && open.seq != seq {
		return open, fmt.Errorf("%w: sequence %q came before the last record of %q", ErrOrder, seq, open.seq)
	}
	partition := Partition(seq, v.partitions)
	if open == nil {
		open = &begun{outSeq: out.begin(seq, v.attempt(), partition)}
	}
	if rec != nil {
		n, err := out.record(ctx, open.outSeq, rec)
		if err != nil {
			return open, err
		}
		open.rows += rec.NumRows()
		open.payload += n
	}
	if last || v.cfg.WhenFull != Shed {
		v.progress.rows.Add(open.rows)
		v.progress.bytes.Add(open.payload)
		open.rows, open.payload = 0, 0
	}
	if !last {
		return open, nil
	}
	if err := out.end(ctx, open.outSeq, nil); err != nil {
		return open, err
	}
	ended[partition]++
	v.progress.published.Add(1)
	return nil, nil
}
