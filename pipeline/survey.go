package pipeline

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go/jetstream"
)

// Survey is what a run has in the server.
type Survey struct {
	Streams []StreamSurvey // none when the run has no streams
	// Shed and ShedRows are what sources dropped because the stream was full.
	Shed, ShedRows int64
	Leases         []LeaseSurvey
}

// LeaseSurvey is a partition that a worker of a group holds.
type LeaseSurvey struct {
	Group     string
	Partition int
	Worker    string
}

// StreamSurvey is one stream of a run.
type StreamSurvey struct {
	Name     string // in JetStream
	Stream   string // [CaptureStream] or [ResultsStream]
	Group    string // of workers, for their results
	Replicas int
	Leader   string // of a cluster
	Messages uint64
	Bytes    uint64
	Readers  []ReaderSurvey
}

// ReaderSurvey is one reader of one partition.
type ReaderSurvey struct {
	Role      string // store; stage, in a job of one process; draft, of a group
	Group     string
	Partition int
	Lag       uint64 // messages that it has not acknowledged
	Floor     uint64 // the stream's number up to which it has acknowledged all
}

// parseConsumer takes the name of a reader's consumer apart.
func parseConsumer(name string) (roleAt, bool) {
	parts := strings.Split(name, "-")
	if len(parts) < 4 {
		return roleAt{}, false
	}
	n := len(parts)
	p, err := strconv.Atoi(parts[n-3])
	return roleAt{strings.Join(parts[:n-3], "-"), p}, err == nil
}

// Survey asks the server for the state of the run's streams.
func (s *Session) Survey(ctx context.Context) (Survey, error) {
	var out Survey
	groups, err := s.Groups(ctx)
	if err != nil {
		return out, err
	}
	routes := []route{{run: s.cfg.Run, stream: CaptureStream}, {run: s.cfg.Run, stream: ResultsStream}}
	partitions := 0
	for i := 0; i < len(routes); i++ {
		r := routes[i]
		stream, err := s.js.Stream(ctx, r.name())
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			continue
		}
		if err != nil {
			return out, fmt.Errorf("looking at stream %s: %w", r.name(), err)
		}
		info := stream.CachedInfo()
		one := StreamSurvey{Name: r.name(), Stream: r.stream, Group: r.group, Messages: info.State.Msgs, Bytes: info.State.Bytes}
		one.Replicas = info.Config.Replicas
		if info.Cluster != nil {
			one.Leader = info.Cluster.Leader
		}
		list := stream.ListConsumers(ctx)
		for c := range list.Info() {
			at, ok := parseConsumer(c.Name)
			if !ok {
				continue
			}
			role, group, _ := strings.Cut(at.role, "-")
			one.Readers = append(one.Readers, ReaderSurvey{
				Role: role, Group: unescapeToken(group), Partition: at.partition,
				Lag: c.NumPending + uint64(c.NumAckPending), Floor: floorOf(c),
			})
		}
		if err := list.Err(); err != nil {
			return out, fmt.Errorf("looking at the readers of %s: %w", r.name(), err)
		}
		out.Streams = append(out.Streams, one)
		if partitions == 0 {
			partitions, _ = strconv.Atoi(info.Config.Metadata[metaPartitions])
			for _, g := range groups {
				for p := range partitions {
					routes = append(routes, route{s.cfg.Run, ResultsStream, g.Name, p})
				}
			}
		}
	}
	if out.Shed, out.ShedRows, err = s.Shed(ctx); err != nil || len(groups) == 0 {
		return out, err
	}
	kv, err := s.js.KeyValue(ctx, leaseBucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return out, nil // nobody has worked yet
	}
	if err != nil {
		return out, fmt.Errorf("looking at the leases: %w", err)
	}
	for _, g := range groups {
		for p := range partitions {
			e, err := kv.Get(ctx, noteKey(s.cfg.Run, "groups", g.Name, "partitions", strconv.Itoa(p)))
			if errors.Is(err, jetstream.ErrKeyNotFound) {
				continue
			}
			if err != nil {
				return out, fmt.Errorf("looking at the leases: %w", err)
			}
			out.Leases = append(out.Leases, LeaseSurvey{g.Name, p, string(e.Value())})
		}
	}
	return out, nil
}

// ends are the numbers of the markers with which the source has ended the
// run on each partition. While one is missing, and while the source is not
// done, it says what is to be waited for.
func (s *Session) ends(ctx context.Context, capture jetstream.Stream) (ends []uint64, missing string, err error) {
	n, err := strconv.Atoi(capture.CachedInfo().Config.Metadata[metaPartitions])
	if err != nil {
		return nil, "", fmt.Errorf("%w: stream %s was not made by draftscope", ErrConfig, capture.CachedInfo().Config.Name)
	}
	// A source means to go on, or somebody is to resume it; one that left no
	// note is taken by its markers.
	state, err := s.sourceState(ctx)
	if state != "" && state != sourceEnded || err != nil {
		return nil, "the source to end the run", err
	}
	ends = make([]uint64, n)
	for p := range n {
		m, err := capture.GetLastMsgForSubject(ctx, Subject(s.cfg.Run, CaptureStream, p))
		missing = fmt.Sprintf("the source's end of partition %d", p)
		if errors.Is(err, jetstream.ErrMsgNotFound) && state == sourceEnded {
			continue // purged, or aged out: nothing is left to read
		}
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return nil, missing, nil
		}
		if err != nil {
			return nil, "", err
		}
		if kind(m.Header.Get(hdrKind)) != kindEndOfRun {
			return nil, missing, nil
		}
		ends[p] = m.Sequence
	}
	return ends, "", nil
}

// upTo says what role has not acknowledged up to ends; nothing if it has all.
func upTo(floors map[roleAt]uint64, role string, ends []uint64) (missing string) {
	for p, end := range ends {
		if floor := floors[roleAt{role, p}]; floor < end {
			return fmt.Sprintf("the acks of %s on partition %d of the capture, at message %d of %d", role, p, floor, end)
		}
	}
	return ""
}

// over is where the source's last run ended in each partition of the capture,
// and how far each of its readers has come; while it goes on, what is missing.
func (s *Session) over(ctx context.Context) (ends []uint64, floors map[roleAt]uint64, missing string, err error) {
	capture, err := s.js.Stream(ctx, StreamName(s.cfg.Run, CaptureStream))
	if err != nil {
		return nil, nil, "", fmt.Errorf("looking whether run %s is over: %w", s.cfg.Run, err)
	}
	if ends, missing, err = s.ends(ctx, capture); missing != "" || err != nil {
		return nil, nil, missing, err
	}
	floors, err = consumerFloors(ctx, capture)
	return ends, floors, "", err
}

// Drafted says that the source has ended and the group's results of
// everything it published are in the server.
func (s *Session) Drafted(ctx context.Context, group string) (bool, error) {
	missing, err := s.toDraft(ctx, group)
	return missing == "" && err == nil, err
}

// toDraft says what is missing until a group has drafted on everything.
func (s *Session) toDraft(ctx context.Context, group string) (missing string, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.ConnectTimeout)
	defer cancel()
	ends, floors, missing, err := s.over(ctx)
	if missing != "" || err != nil {
		return missing, err
	}
	return upTo(floors, roleOf(group), ends), nil
}

// Stored says that the source has ended, and that everything it published and
// all results of every group, and of [Config.Groups] at least, are stored.
func (s *Session) Stored(ctx context.Context) (bool, error) {
	missing, err := s.toStore(ctx)
	return missing == "" && err == nil, err
}

// toStore says what is missing until everything is stored.
func (s *Session) toStore(ctx context.Context) (missing string, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.ConnectTimeout)
	defer cancel()
	ends, floors, missing, err := s.over(ctx)
	if missing != "" || err != nil {
		return missing, err
	}
	if missing = upTo(floors, roleStore, ends); missing != "" {
		return missing, nil
	}
	groups, err := s.Groups(ctx)
	if err != nil {
		return "", err
	}
	if len(groups) < s.cfg.Groups {
		return fmt.Sprintf("%d groups of workers, %d have come", s.cfg.Groups, len(groups)), nil
	}
	for _, g := range groups {
		if missing = upTo(floors, roleOf(g.Name), ends); missing != "" {
			return missing, nil
		}
		for p := range ends {
			results, err := s.js.Stream(ctx, GroupStreamName(s.cfg.Run, g.Name, p))
			if err != nil {
				return "", err
			}
			done, err := consumerFloors(ctx, results)
			if err != nil {
				return "", err
			}
			state := results.CachedInfo().State
			if floor, last := done[roleAt{roleStore, p}], state.LastSeq; floor < last && state.Msgs > 0 {
				return fmt.Sprintf("the store's acks of the results of group %s on partition %d, at message %d of %d", g.Name, p, floor, last), nil
			}
		}
	}
	return "", nil
}
