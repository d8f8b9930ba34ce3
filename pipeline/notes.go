package pipeline

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// notesBucket is the key-value bucket in which the processes of a run tell
// each other what they are. Keys are tokens joined by dots, the run first.
const notesBucket = "draftscope_notes"

// Group is a set of workers that do the same to every sequence of a run.
type Group struct {
	Name  string
	About []byte // what DescribeGroup was given
}

// shedNote counts what one invocation of a source dropped.
type shedNote struct {
	Sequences int64 `json:"sequences"`
	Rows      int64 `json:"rows"`
}

// What a source says of itself. A source that was told to stop early sends
// the same end-of-run markers as one that has no more.
const (
	sourceRunning = "running"
	sourceStopped = "stopped early"
	sourceEnded   = "ended"
)

func (s *Session) noteSource(ctx context.Context, state string) error {
	return s.patiently(ctx, func(ctx context.Context) error {
		kv, err := s.notes(ctx)
		if err == nil {
			_, err = kv.Put(ctx, noteKey(s.cfg.Run, "source"), []byte(state))
		}
		if err != nil {
			return fmt.Errorf("noting that the source is %s: %w", state, err)
		}
		return nil
	})
}

// sourceState is what the run's source says of itself; one that left no note,
// nothing.
func (s *Session) sourceState(ctx context.Context) (string, error) {
	kv, err := s.notes(ctx)
	if err != nil {
		return "", err
	}
	e, err := kv.Get(ctx, noteKey(s.cfg.Run, "source"))
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("reading the state of the source: %w", err)
	}
	return string(e.Value()), nil
}

func openBucket(ctx context.Context, js jetstream.JetStream, cfg jetstream.KeyValueConfig) (jetstream.KeyValue, error) {
	kv, err := js.KeyValue(ctx, cfg.Bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		cfg.Replicas = max(1, cfg.Replicas)
		kv, err = js.CreateKeyValue(ctx, cfg)
		if errors.Is(err, jetstream.ErrBucketExists) {
			kv, err = js.KeyValue(ctx, cfg.Bucket)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("opening the bucket %s: %w", cfg.Bucket, err)
	}
	return kv, nil
}

func (s *Session) notes(ctx context.Context) (jetstream.KeyValue, error) {
	return openBucket(ctx, s.js, jetstream.KeyValueConfig{
		Bucket: notesBucket, Description: "what draftscope's processes tell each other", Replicas: s.cfg.Replicas,
	})
}

func noteKey(parts ...string) string {
	for i := range parts {
		parts[i] = escapeToken(parts[i])
	}
	return strings.Join(parts, ".")
}

func unescapeToken(s string) string {
	if out, err := url.PathUnescape(strings.ReplaceAll(s, "=", "%")); err == nil {
		return out
	}
	return s
}

// describe leaves a note unless there is one, and returns the one in force.
func (s *Session) describe(ctx context.Context, key string, about []byte) (inForce []byte, err error) {
	err = s.patiently(ctx, func(ctx context.Context) error {
		inForce, err = s.leave(ctx, key, about)
		return err
	})
	return inForce, err
}

func (s *Session) leave(ctx context.Context, key string, about []byte) ([]byte, error) {
	kv, err := s.notes(ctx)
	if err != nil {
		return nil, err
	}
	_, err = kv.Create(ctx, key, about)
	if err == nil {
		return about, nil
	}
	if !errors.Is(err, jetstream.ErrKeyExists) {
		return nil, fmt.Errorf("leaving the note %s: %w", key, err)
	}
	have, err := kv.Get(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("reading the note %s: %w", key, err)
	}
	return have.Value(), nil
}

// DescribeRun says what the run is, in a form of the caller's, for processes
// on other machines. The first description stands; it is returned, so that the
// caller can tell whether it continues the same run.
func (s *Session) DescribeRun(ctx context.Context, about []byte) (inForce []byte, err error) {
	return s.describe(ctx, noteKey(s.cfg.Run, "about"), about)
}

// DescribeGroup says what the workers of a group do; see [Session.DescribeRun].
func (s *Session) DescribeGroup(ctx context.Context, group string, about []byte) (inForce []byte, err error) {
	return s.describe(ctx, noteKey(s.cfg.Run, "groups", group), about)
}

// RunDescription is what DescribeRun was given; nil when no process has said.
func (s *Session) RunDescription(ctx context.Context) (about []byte, err error) {
	err = s.patiently(ctx, func(ctx context.Context) error {
		about, err = s.runDescription(ctx)
		return err
	})
	return about, err
}

func (s *Session) runDescription(ctx context.Context) ([]byte, error) {
	kv, err := s.notes(ctx)
	if err != nil {
		return nil, err
	}
	e, err := kv.Get(ctx, noteKey(s.cfg.Run, "about"))
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the description of run %s: %w", s.cfg.Run, err)
	}
	return e.Value(), nil
}

// AwaitDescription waits until a process has called DescribeRun; false when
// told to drain before.
func (s *Session) AwaitDescription(ctx context.Context) (bool, error) {
	for {
		about, err := s.runDescription(ctx)
		if about != nil || err != nil && !outage(err) {
			return err == nil, err
		}
		if lost := s.outage(); lost > s.cfg.OutageTimeout {
			return false, fmt.Errorf("%w at %s for %s", ErrNoServer, redacted(s.cfg.URL), s.cfg.OutageTimeout)
		}
		select {
		case <-time.After(300 * time.Millisecond):
		case <-s.cfg.Drain:
			return false, nil
		case <-ctx.Done():
			return false, context.Cause(ctx)
		}
	}
}

// list reads the notes whose key begins with prefix and a dot.
func (s *Session) list(ctx context.Context, prefix string) (map[string][]byte, error) {
	kv, err := s.notes(ctx)
	if err != nil {
		return nil, err
	}
	keys, err := s.noteKeys(ctx, prefix+".*")
	if err != nil {
		return nil, err
	}
	out := map[string][]byte{}
	for _, key := range keys {
		e, err := kv.Get(ctx, key)
		if errors.Is(err, jetstream.ErrKeyNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading the note %s: %w", key, err)
		}
		out[unescapeToken(strings.TrimPrefix(key, prefix+"."))] = e.Value()
	}
	return out, nil
}

// noteKeys lists the keys of notes that match, by one question to the server.
func (s *Session) noteKeys(ctx context.Context, pattern string) ([]string, error) {
	stream, err := s.js.Stream(ctx, "KV_"+notesBucket)
	if err != nil {
		return nil, fmt.Errorf("listing notes: %w", err)
	}
	const prefix = "$KV." + notesBucket + "."
	info, err := stream.Info(ctx, jetstream.WithSubjectFilter(prefix+pattern))
	if err != nil {
		return nil, fmt.Errorf("listing notes: %w", err)
	}
	var keys []string
	for subject := range info.State.Subjects {
		keys = append(keys, strings.TrimPrefix(subject, prefix))
	}
	return keys, nil
}

// Groups lists the groups of workers that the run has had, by name.
func (s *Session) Groups(ctx context.Context) ([]Group, error) {
	notes, err := s.list(ctx, noteKey(s.cfg.Run, "groups"))
	if err != nil {
		return nil, err
	}
	var groups []Group
	for name, about := range notes {
		groups = append(groups, Group{name, about})
	}
	slices.SortFunc(groups, func(a, b Group) int { return strings.Compare(a.Name, b.Name) })
	return groups, nil
}

// Shed is what the run's sources have dropped because the stream was full.
func (s *Session) Shed(ctx context.Context) (sequences, rows int64, err error) {
	notes, err := s.list(ctx, noteKey(s.cfg.Run, "shed"))
	if err != nil {
		return 0, 0, err
	}
	for _, b := range notes {
		var n shedNote
		if err := json.Unmarshal(b, &n); err != nil {
			return 0, 0, fmt.Errorf("reading what was shed: %w", err)
		}
		sequences, rows = sequences+n.Sequences, rows+n.Rows
	}
	return sequences, rows, nil
}

// noteShed tells what this invocation has dropped so far.
func (s *Session) noteShed(ctx context.Context, nonce string, n shedNote) error {
	b, err := json.Marshal(n)
	if err != nil {
		return err
	}
	kv, err := s.notes(ctx)
	if err == nil {
		_, err = kv.Put(ctx, noteKey(s.cfg.Run, "shed", nonce), b)
	}
	return err
}

// softKey is the note of NoteSoftBytes. The second token is that of no run's
// note but of its description.
const softKey = "defaults.soft_bytes"

// NoteSoftBytes says what [Config.SoftBytes] is for sources and workers on
// this server that have none of their own; 0 for no bound.
func (s *Session) NoteSoftBytes(ctx context.Context, n int64) error {
	return s.patiently(ctx, func(ctx context.Context) error {
		kv, err := s.notes(ctx)
		if err == nil {
			_, err = kv.Put(ctx, softKey, strconv.AppendInt(nil, n, 10))
		}
		if err != nil {
			return fmt.Errorf("noting how much streams may hold: %w", err)
		}
		return nil
	})
}

// takeSoftBytes sets SoftBytes to what the server's note says, unless there is
// a bound already.
func (s *Session) takeSoftBytes(ctx context.Context) error {
	if s.cfg.MaxBytes > 0 || s.cfg.SoftBytes > 0 {
		return nil
	}
	return s.patiently(ctx, func(ctx context.Context) error {
		kv, err := s.notes(ctx)
		if err != nil {
			return err
		}
		e, err := kv.Get(ctx, softKey)
		if errors.Is(err, jetstream.ErrKeyNotFound) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading how much streams may hold: %w", err)
		}
		n, err := strconv.ParseInt(string(e.Value()), 10, 64)
		if err != nil || n < 0 {
			return fmt.Errorf("%w: the note %s says %q, want a number of bytes", ErrConfig, softKey, e.Value())
		}
		s.cfg.SoftBytes = n
		return nil
	})
}

// Runs lists the described runs of the server, of whatever name the session is.
func (s *Session) Runs(ctx context.Context) ([]string, error) {
	if _, err := s.notes(ctx); err != nil {
		return nil, err
	}
	keys, err := s.noteKeys(ctx, "*.about")
	if err != nil {
		return nil, err
	}
	var runs []string
	for _, key := range keys {
		runs = append(runs, unescapeToken(strings.TrimSuffix(key, ".about")))
	}
	slices.Sort(runs)
	return runs, nil
}
