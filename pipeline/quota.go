package pipeline

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// quota keeps a stream of limited size from filling up. At half of the limit
// it purges what every reader has acknowledged; at 70 % it asks sinks to
// commit and makes the publisher wait. That the server refuses messages when
// full (discard new) is only the backstop: each refused message was sent in
// full. A soft limit has no such backstop: what is in progress, and cannot be
// acknowledged before its end, passes it.
type quota struct {
	limit   int64
	soft    bool
	stream  jetstream.Stream
	route   route
	timeout time.Duration

	mu      sync.Mutex
	readers map[int][]*reader                             // by partition
	floors  func(context.Context) (map[int]uint64, error) // of readers elsewhere
	purged  map[int]uint64                                // floor of the last purge
	used    int64                                         // by the server's last word, plus what was sent since
	open    int64                                         // of used, by sequences whose end is still to come
	asked   time.Time
	urged   time.Time // when readers were last asked to commit
	told    waiting

	// patience is how long wait lets one chunk wait before it says errFull; 0
	// is for ever. It is set before the first wait.
	patience time.Duration
}

// shedPatience is how long the chunk of a sequence that has begun waits for
// readers before the sequence is given up: longer than a commit takes, and
// short for who waits for the source.
const shedPatience = time.Second

// errFull says that readers did not make room in time.
var errFull = errors.New("the stream is full")

// slack is what a stream may hold beside sequences in progress when everybody
// has read all else: markers that nobody acknowledged yet.
const slack = 64 << 10

// newQuota makes the quota of a stream; nil for one without any limit.
func newQuota(cfg Config, to route, stream jetstream.Stream) *quota {
	if cfg.MaxBytes == 0 && cfg.SoftBytes == 0 {
		return nil
	}
	return &quota{
		limit: cmp.Or(cfg.MaxBytes, cfg.SoftBytes), soft: cfg.MaxBytes == 0, stream: stream, route: to, timeout: cfg.ConnectTimeout,
		readers: map[int][]*reader{}, purged: map[int]uint64{},
		used: int64(stream.CachedInfo().State.Bytes), told: waiting{log: cfg.Logger},
	}
}

// attach makes the quota mind what one more reader has acknowledged. Every
// reader has to be attached before the first wait.
func (q *quota) attach(r *reader) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.readers[r.partition] = append(q.readers[r.partition], r)
}

// wait returns when there is room for size more bytes of o, or with errFull
// when patience has run out.
func (q *quota) wait(ctx context.Context, o *outSeq, size int64) error {
	size += 512 // header and the store's own
	for start := time.Now(); ; {
		fits, err := q.take(ctx, o, size)
		if fits || err != nil {
			return err
		}
		if q.patience > 0 && time.Since(start) > q.patience {
			return errFull
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (q *quota) take(ctx context.Context, o *outSeq, size int64) (bool, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	full := q.limit / 10 * 7
	patience := 100 * time.Millisecond
	if q.used+size > full && q.floors == nil {
		patience = 10 * time.Millisecond // somebody is waiting
	}
	if q.used+size > q.limit/2 && time.Since(q.asked) > patience {
		if err := q.reclaimLocked(ctx); err != nil {
			return false, err
		}
	}
	if q.open+size > full && !q.soft {
		return false, fmt.Errorf("%w: sequence %q and others in progress need more than 70 %% of the %d bytes of stream %s; allow it more, or no limit",
			ErrSequenceTooLarge, o.seq, q.limit, q.route.name())
	}
	passes := q.soft && q.used-q.open <= slack // nothing else is there to wait for
	if q.used+size > full && !passes {
		q.urge()
		q.told.tell(fmt.Sprintf("readers to make room in stream %s, whose bound is %d MB; inspect --nats says who is behind", q.route.name(), q.limit/1e6))
		return false, nil
	}
	q.told.tell("")
	q.used += size
	q.open += size
	o.bytes += size
	return true, nil
}

// urge asks readers to commit what they hold, but not so often that each file
// would hold a sequence only.
func (q *quota) urge() {
	if time.Since(q.urged) < 250*time.Millisecond {
		return
	}
	q.urged = time.Now()
	for _, readers := range q.readers {
		for _, r := range readers {
			select {
			case r.urged <- struct{}{}:
			default:
			}
		}
	}
}

// close says that o's end marker is on its way, or will never come.
func (q *quota) close(o *outSeq) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.open -= o.bytes
	o.bytes = 0
}

// crowded says that the stream is half full or fuller with what somebody
// still has to read.
func (q *quota) crowded(ctx context.Context) (bool, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.used > q.limit/2 && time.Since(q.asked) > 100*time.Millisecond {
		if err := q.reclaimLocked(ctx); err != nil {
			return false, err
		}
	}
	return q.used > q.limit/2, nil
}

// reclaim purges what nobody needs and asks how full the stream is.
func (q *quota) reclaim(ctx context.Context) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.reclaimLocked(ctx)
}

// reclaimLocked tries; an outage is no error, it only frees nothing.
func (q *quota) reclaimLocked(ctx context.Context) error {
	q.asked = time.Now()
	ask, cancel := context.WithTimeout(ctx, q.timeout)
	defer cancel()
	floors := map[int]uint64{}
	if q.floors != nil {
		far, err := q.floors(ask)
		if err != nil {
			return context.Cause(ctx)
		}
		floors = far
	}
	for partition, readers := range q.readers {
		floor := readers[0].books.acknowledged()
		for _, r := range readers[1:] {
			floor = min(floor, r.books.acknowledged())
		}
		floors[partition] = floor
	}
	for partition, floor := range floors {
		if floor <= q.purged[partition] {
			continue
		}
		err := q.stream.Purge(ask, jetstream.WithPurgeSubject(q.route.subject(partition)), jetstream.WithPurgeSequence(floor+1))
		if err != nil {
			return context.Cause(ctx)
		}
		q.purged[partition] = floor
	}
	info, err := q.stream.Info(ask)
	if err != nil {
		return context.Cause(ctx)
	}
	q.used = int64(info.State.Bytes)
	return nil
}
