package pipeline

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
)

// Publish puts what src gives into the run's capture stream, for workers and
// stores elsewhere, and returns when the server has all of it. A run has one
// source at a time. A Publish that was stopped leaves a sequence without an
// end at most; the next one has to begin with that sequence again:
// [Session.Published] says which are complete.
//
// With [Config.MaxBytes] or [Config.SoftBytes] the stream forgets what the store and every group of
// workers have acknowledged, and a source that is ahead of them is treated as
// [Config.WhenFull] says.
func (s *Session) Publish(ctx context.Context, src Source) (Summary, error) {
	v := s.begin()
	err := v.noteSource(ctx, sourceRunning)
	if err == nil {
		err = v.takeSoftBytes(ctx)
	}
	drained := false
	if err == nil {
		drained, err = v.publishAll(ctx, src)
	}
	if err == nil {
		state := sourceEnded
		if drained {
			state = sourceStopped
		}
		if err = v.noteSent(ctx); err == nil {
			err = v.noteSource(ctx, state)
		}
	}
	sum := Summary{Progress: v.progress.snapshot(), Drained: drained, Partitions: v.partitions}
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("source of run %s stopped before its end: %w", s.cfg.Run, err)
	}
	return sum, s.explain(ctx, err)
}

func (v *invocation) publishAll(ctx context.Context, src Source) (drained bool, err error) {
	to := v.route(CaptureStream)
	var out *publisher
	err = v.patiently(ctx, func(ctx context.Context) (err error) {
		if v.partitions, err = openStreams(ctx, v.js, v.cfg, []string{CaptureStream}); err == nil {
			out, err = newPublisher(ctx, v.cfg, to, v.nc, v.js)
		}
		return err
	})
	if err != nil {
		return false, err
	}
	if out.quota != nil {
		out.quota.floors = func(ctx context.Context) (map[int]uint64, error) {
			groups, err := v.Groups(ctx)
			if err != nil {
				return nil, err
			}
			roles := []string{roleStore}
			for _, g := range groups {
				roles = append(roles, roleOf(g.Name))
			}
			return v.floors(ctx, to, roles)
		}
	}
	g, ctx := errgroup.WithContext(ctx)
	done := make(chan struct{})
	g.Go(func() error { return out.serve(ctx, done) })
	g.Go(func() error { return v.watch(ctx, done, func() []*reader { return nil }) })
	g.Go(func() error {
		defer close(done)
		for p := range v.partitions {
			if err := out.control(ctx, kindBegin, v.nonce, p, 0); err != nil {
				return err
			}
		}
		var err error
		drained, err = v.feed(ctx, src, out)
		return err
	})
	err = g.Wait()
	return drained, err
}

// Published lists the sequences that the capture stream holds, whole, and those
// that a store has taken out of it, with the partition of each. It reads
// headers only.
func (s *Session) Published(ctx context.Context) (whole map[string]int, err error) {
	err = s.patiently(ctx, func(ctx context.Context) error {
		whole, err = s.published(ctx)
		return err
	})
	return whole, err
}

func (s *Session) published(ctx context.Context) (map[string]int, error) {
	whole, err := s.storedSequences(ctx)
	if err != nil {
		return nil, err
	}
	stream, err := s.js.Stream(ctx, StreamName(s.cfg.Run, CaptureStream))
	if err != nil {
		if partitions, perr := storedPartitions(ctx, s.js, s.cfg.Run, CaptureStream); partitions == 0 && perr == nil {
			return whole, nil // there is none
		}
		return nil, fmt.Errorf("reading what run %s has published: %w", s.cfg.Run, err)
	}
	partitions, err := storedPartitions(ctx, s.js, s.cfg.Run, CaptureStream)
	if err != nil {
		return nil, err
	}
	return whole, s.eachHeader(ctx, stream, "", func(h header, _ uint64) {
		if h.kind == kindEnd {
			whole[h.seq] = Partition(h.seq, partitions)
		}
	})
}
