package pipeline

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// duplicates is how long the server remembers message ids: longer than any
// publisher keeps trying.
const duplicates = 10 * time.Minute

const metaPartitions = "draftscope.partitions"

func streamConfig(cfg Config, to route, partitions int) jetstream.StreamConfig {
	maxBytes := int64(-1)
	if cfg.MaxBytes > 0 {
		maxBytes = cfg.MaxBytes
	}
	window := duplicates
	if cfg.MaxAge > 0 {
		window = min(window, cfg.MaxAge) // the server wants it so
	}
	return jetstream.StreamConfig{
		Name:        to.name(),
		Description: strings.TrimSpace("draftscope run " + cfg.Run + ": " + to.stream + " " + to.group),
		Subjects:    []string{to.subjects()},
		Storage:     jetstream.FileStorage,
		Retention:   jetstream.LimitsPolicy,
		Discard:     jetstream.DiscardNew,
		MaxBytes:    maxBytes,
		MaxAge:      cfg.MaxAge,
		Replicas:    cfg.Replicas,
		Duplicates:  window,
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
		if err := openStream(ctx, js, cfg, route{run: cfg.Run, stream: name}, partitions); err != nil {
			return 0, err
		}
	}
	return partitions, nil
}

// openStream creates a stream, or gives an existing one the limits of cfg.
func openStream(ctx context.Context, js jetstream.JetStream, cfg Config, to route, partitions int) error {
	want := streamConfig(cfg, to, partitions)
	have, err := js.Stream(ctx, to.name())
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		if _, err = js.CreateStream(ctx, want); err == nil || errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			return nil
		}
	case err == nil:
		now := have.CachedInfo().Config
		if want.Replicas == 0 {
			want.Replicas = now.Replicas
		}
		if now.MaxBytes == want.MaxBytes && now.MaxAge == want.MaxAge && now.Replicas == want.Replicas {
			return nil
		}
		_, err = js.UpdateStream(ctx, want)
	}
	if err != nil {
		return fmt.Errorf("creating stream %s: %w", to.name(), explained(err))
	}
	return nil
}

// deleteStreams forgets a run's streams.
func deleteStreams(ctx context.Context, js jetstream.JetStream, run string) error {
	var errs []error
	names := []string{StreamName(run, CaptureStream), StreamName(run, ResultsStream)}
	prefix := StreamName(run, ResultsStream) + "_"
	list := js.StreamNames(ctx, jetstream.WithStreamListSubject("ds."+escapeToken(run)+"."+ResultsStream+".*.*"))
	for name := range list.Name() {
		if strings.HasPrefix(name, prefix) {
			names = append(names, name)
		}
	}
	if err := list.Err(); err != nil {
		errs = append(errs, fmt.Errorf("listing streams: %w", err))
	}
	for _, name := range names {
		err := js.DeleteStream(ctx, name)
		if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			errs = append(errs, fmt.Errorf("deleting stream %s: %w", name, err))
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
