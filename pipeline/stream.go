package pipeline

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// duplicates is how long the server remembers message ids: longer than any
// publisher keeps trying.
const duplicates = 10 * time.Minute

const metaPartitions = "draftscope.partitions"

func streamConfig(cfg Config, stream string, partitions int) jetstream.StreamConfig {
	maxBytes := int64(-1)
	if cfg.MaxBytes > 0 {
		maxBytes = cfg.MaxBytes
	}
	return jetstream.StreamConfig{
		Name:        StreamName(cfg.Run, stream),
		Description: "draftscope run " + cfg.Run + ": " + stream,
		Subjects:    []string{"ds." + escapeToken(cfg.Run) + "." + stream + ".*"},
		Storage:     jetstream.FileStorage,
		Retention:   jetstream.LimitsPolicy,
		Discard:     jetstream.DiscardNew,
		MaxBytes:    maxBytes,
		Duplicates:  duplicates,
		Metadata:    map[string]string{metaPartitions: strconv.Itoa(partitions)},
	}
}

// storedPartitions is the number of partitions that an existing stream was
// made with, 0 when there is none.
func storedPartitions(ctx context.Context, js jetstream.JetStream, run, stream string) (int, error) {
	s, err := js.Stream(ctx, StreamName(run, stream))
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("looking for stream %s: %w", StreamName(run, stream), err)
	}
	n, err := strconv.Atoi(s.CachedInfo().Config.Metadata[metaPartitions])
	if err != nil || n < 1 || n > 256 {
		return 0, fmt.Errorf("%w: stream %s was not made by draftscope; delete it or choose another run name", ErrConfig, StreamName(run, stream))
	}
	return n, nil
}

// openStreams creates the streams of a run, or finds those of an earlier
// invocation, and returns the number of partitions in force.
func openStreams(ctx context.Context, js jetstream.JetStream, cfg Config, streams []string) (partitions int, err error) {
	partitions = cfg.Partitions
	for _, name := range []string{CaptureStream, ResultsStream} {
		n, err := storedPartitions(ctx, js, cfg.Run, name)
		if err != nil {
			return 0, err
		}
		if n > 0 {
			partitions = n
			break
		}
	}
	for _, name := range streams {
		if _, err := js.CreateOrUpdateStream(ctx, streamConfig(cfg, name, partitions)); err != nil {
			return 0, fmt.Errorf("creating stream %s: %w", StreamName(cfg.Run, name), err)
		}
	}
	return partitions, nil
}

// deleteStreams forgets a run's streams.
func deleteStreams(ctx context.Context, js jetstream.JetStream, run string) error {
	var errs []error
	for _, name := range []string{CaptureStream, ResultsStream} {
		err := js.DeleteStream(ctx, StreamName(run, name))
		if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			errs = append(errs, fmt.Errorf("deleting stream %s: %w", StreamName(run, name), err))
		}
	}
	return errors.Join(errs...)
}

// StreamCreated is when the server made a stream of the run. A stream that is
// deleted and made anew counts its messages from one again; its creation
// tells the two apart.
func (s *Session) StreamCreated(ctx context.Context, stream string) (time.Time, error) {
	name := StreamName(s.cfg.Run, stream)
	info, err := s.js.Stream(ctx, name)
	if err != nil {
		return time.Time{}, fmt.Errorf("looking for stream %s: %w", name, err)
	}
	return info.CachedInfo().Created, nil
}
