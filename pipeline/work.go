package pipeline

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"
)

// crew is one worker's part in a group: the partitions it holds.
type crew struct {
	*Session
	group      string
	newStage   NewStage
	book       *leases
	partitions int
	presence   *lease
	held       map[int]*tenure
}

// tenure is the time for which a worker holds a partition.
type tenure struct {
	lease    *lease
	stop     chan struct{} // closed to end it after the sequence at hand
	stopping bool
	cancel   context.CancelFunc // ends it at once
	done     chan struct{}      // closed when it has ended
	err      error
}

func (t *tenure) end() {
	if !t.stopping {
		t.stopping = true
		close(t.stop)
	}
}

// Work puts the run's captures through stages, as one of any number of
// workers of a group, and publishes what they emit. The workers share the
// run's partitions; each partition is one worker's at a time, by a lease in
// the server. When a worker dies another goes on behind the last complete
// sequence once the lease has run out; one that stops hands over at once.
//
// It waits for the run to begin, and works until [Config.Drain] is closed,
// ctx ends, a stage fails, or, with [Config.Once], until everything that the
// source published is through. newStage is called each time that a partition
// is taken over; what it returned for that partition before is not used any
// more then.
func (s *Session) Work(ctx context.Context, group string, newStage NewStage) error {
	if err := checkGroup(group); err != nil {
		return err
	}
	partitions, err := s.await(ctx)
	if partitions == 0 || err != nil {
		return err
	}
	if err := s.takeSoftBytes(ctx); err != nil {
		return err
	}
	host, _ := os.Hostname() // only for people to read
	book, err := s.openLeases(ctx, fmt.Sprintf("%s@%s/%d", newNonce(), host, os.Getpid()))
	if err != nil {
		return err
	}
	c := &crew{Session: s, group: group, newStage: newStage, book: book, partitions: partitions, held: map[int]*tenure{}}
	err = c.run(ctx)
	if ctx.Err() != nil {
		err = fmt.Errorf("worker of group %s stopped: %w", group, context.Cause(ctx))
	}
	return errors.Join(s.explain(ctx, err), c.disband())
}

func checkGroup(group string) error {
	if group == "" || len(group) > maxRunName {
		return fmt.Errorf("%w: group name %q has to be 1 to %d bytes", ErrConfig, group, maxRunName)
	}
	return nil
}

// await returns the number of partitions once the run has a capture stream; 0
// when it was told to drain before.
func (s *Session) await(ctx context.Context) (partitions int, err error) {
	patience := waiting{log: s.cfg.Logger}
	for {
		patience.tell("the source of run " + s.cfg.Run + " to open its stream")
		n, err := storedPartitions(ctx, s.js, s.cfg.Run, CaptureStream)
		if n > 0 || err != nil && !outage(err) {
			return n, err
		}
		if s.outage() > s.cfg.OutageTimeout {
			return 0, fmt.Errorf("%w at %s for %s", ErrNoServer, redacted(s.cfg.URL), s.cfg.OutageTimeout)
		}
		select {
		case <-time.After(300 * time.Millisecond):
		case <-s.cfg.Drain:
			return 0, nil
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

func (c *crew) key(kind, name string) string {
	return noteKey(c.cfg.Run, "groups", c.group, kind, name)
}

// run minds the leases. Each held partition is worked on by a goroutine.
func (c *crew) run(ctx context.Context) error {
	tick := time.NewTicker(c.cfg.LeaseTTL / 20)
	defer tick.Stop()
	drain, draining := c.cfg.Drain, false
	// The question whether the run is over may take longer than a lease.
	over := make(chan error, 1)
	if c.cfg.Once {
		asking, stop := context.WithCancel(ctx)
		asked := make(chan struct{})
		go func() {
			defer close(asked)
			over <- c.untilDrafted(asking)
		}()
		defer func() { stop(); <-asked }()
	}
	for {
		c.renew(ctx)
		if err := c.collect(ctx); err != nil {
			return err
		}
		if draining {
			for _, t := range c.held {
				t.end()
			}
			if len(c.held) == 0 {
				return nil
			}
		} else {
			c.balance(ctx)
		}
		select {
		case <-tick.C:
		case <-drain:
			drain, draining = nil, true
		case err := <-over:
			if err != nil {
				return err
			}
			draining = true
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// untilDrafted returns once the group is through.
func (c *crew) untilDrafted(ctx context.Context) error {
	patience := waiting{log: c.cfg.Logger}
	for {
		missing, err := c.toDraft(ctx, c.group)
		switch {
		case err == nil && missing == "":
			return nil
		case err == nil:
			patience.tell(missing)
		case outage(err):
			patience.tell("the server to answer: " + err.Error())
		default:
			return err
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// renew renews what is due, and ends what is lost.
func (c *crew) renew(ctx context.Context) {
	if c.presence != nil && c.book.due(c.presence) {
		if err := c.book.renew(ctx, c.presence); errors.Is(err, errLeaseLost) || c.book.expired(c.presence) {
			c.presence = nil
		}
	}
	if c.presence == nil {
		l, err := c.book.acquire(ctx, c.key("workers", c.book.id))
		if err != nil {
			c.cfg.Logger.Debug("saying that this worker is there", "error", err)
		}
		c.presence = l
	}
	for p, t := range c.held {
		if !c.book.due(t.lease) {
			continue
		}
		err := c.book.renew(ctx, t.lease)
		if errors.Is(err, errLeaseLost) || c.book.expired(t.lease) {
			c.cfg.Logger.Warn("lost the lease of a partition, leaving it to another worker", "run", c.cfg.Run, "group", c.group, "partition", p)
			t.stopping = true
			t.cancel()
		}
	}
}

// collect takes leave of tenures that have ended.
func (c *crew) collect(ctx context.Context) error {
	for p, t := range c.held {
		select {
		case <-t.done:
		default:
			continue
		}
		delete(c.held, p)
		c.counters().leases.Add(-1)
		c.giveBack(context.WithoutCancel(ctx), t.lease)
		if t.err != nil && !t.stopping {
			return t.err
		}
	}
	return nil
}

func (c *crew) giveBack(ctx context.Context, l *lease) {
	if c.book.expired(l) {
		return
	}
	if err := c.book.release(ctx, l); err != nil {
		c.cfg.Logger.Debug("giving a lease back; it will run out", "key", l.key, "error", err)
	}
}

// balance takes over free partitions up to this worker's share and hands over
// what is beyond it.
func (c *crew) balance(ctx context.Context) {
	members, err := c.book.holders(ctx, noteKey(c.cfg.Run, "groups", c.group, "workers"))
	if err != nil || c.presence == nil {
		return // an outage
	}
	self := escapeToken(c.book.id)
	if !slices.Contains(members, self) {
		members = append(members, self)
	}
	slices.Sort(members)
	rank := slices.Index(members, self)
	share := c.partitions / len(members)
	if rank < c.partitions%len(members) {
		share++
	}
	var active []int
	for p, t := range c.held {
		if !t.stopping {
			active = append(active, p)
		}
	}
	slices.Sort(active)
	for len(active) > share {
		c.held[active[len(active)-1]].end()
		active = active[:len(active)-1]
	}
	for i := range c.partitions {
		p := (i + rank) % c.partitions
		if len(active) >= share || ctx.Err() != nil {
			return
		}
		if c.held[p] != nil {
			continue
		}
		l, err := c.book.acquire(ctx, c.key("partitions", strconv.Itoa(p)))
		if err != nil || l == nil {
			continue
		}
		c.take(ctx, p, l)
		active = append(active, p)
	}
}

// take begins to work on a partition.
func (c *crew) take(ctx context.Context, partition int, l *lease) {
	ctx, cancel := context.WithCancel(ctx)
	t := &tenure{lease: l, stop: make(chan struct{}), cancel: cancel, done: make(chan struct{})}
	c.held[partition] = t
	c.counters().leases.Add(1)
	c.cfg.Logger.Debug("took over a partition", "run", c.cfg.Run, "group", c.group, "partition", partition)
	go func() {
		defer close(t.done)
		defer cancel()
		t.err = c.hold(ctx, t, partition)
	}()
}

// disband ends all tenures and gives the leases back.
func (c *crew) disband() error {
	var errs []error
	for _, t := range c.held {
		t.stopping = true
		t.cancel()
	}
	ctx := context.Background()
	for p, t := range c.held {
		<-t.done
		c.counters().leases.Add(-1)
		c.giveBack(ctx, t.lease)
		delete(c.held, p)
	}
	if c.presence != nil {
		c.giveBack(ctx, c.presence)
	}
	return errors.Join(errs...)
}

// hold works on a partition until it is told to stop or fails.
func (c *crew) hold(ctx context.Context, t *tenure, partition int) error {
	stage, err := c.newStage(partition)
	if err != nil {
		return fmt.Errorf("opening the stage of partition %d: %w", partition, err)
	}
	for {
		err := c.work(ctx, t.stop, partition, stage)
		switch {
		case errors.Is(err, errStopped):
			return nil
		case err == nil: // the source has ended; it may be resumed
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, ErrAnotherWriter), outage(err):
			// If the lease is another's by now, we shall hear of it.
			c.cfg.Logger.Debug("beginning again", "group", c.group, "partition", partition, "why", err)
			select {
			case <-time.After(200 * time.Millisecond):
			case <-t.stop:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		default:
			return err
		}
	}
}

// work reads a partition from where its group is, until the source's end.
func (c *crew) work(ctx context.Context, stop <-chan struct{}, partition int, stage Stage) (err error) {
	v := c.invocation(c.counters())
	v.partitions = c.partitions
	to := route{c.cfg.Run, ResultsStream, c.group, partition}
	if err := openStream(ctx, c.js, c.cfg, to, c.partitions); err != nil {
		return err
	}
	results, err := newPublisher(ctx, c.cfg, to, c.nc, c.js)
	if err != nil {
		return err
	}
	if results.quota != nil {
		results.quota.floors = func(ctx context.Context) (map[int]uint64, error) { return c.floors(ctx, to, []string{roleStore}) }
	}
	r, err := openReader(ctx, v, v.route(CaptureStream), roleOf(c.group), partition)
	if err != nil {
		return err
	}
	r.foreign, r.ends, r.stop = true, true, stop
	r.handler = &stageHandler{run: v, stage: stage, partition: partition, results: results, books: r.books}
	defer r.abandon()

	g, ctx := errgroup.WithContext(ctx)
	done := make(chan struct{})
	g.Go(func() error { return results.serve(ctx, done) })
	g.Go(func() error { return v.watch(ctx, done, func() []*reader { return []*reader{r} }) })
	g.Go(func() error {
		defer close(done)
		if err := results.control(ctx, kindBegin, v.nonce, partition, 0); err != nil {
			return err
		}
		return r.read(ctx)
	})
	return g.Wait()
}

// roleStore and roleOf name readers in the names of their consumers.
const roleStore = "store"

func roleOf(group string) string { return "draft-" + escapeGroup(group) }

// floors says, for each partition of a stream, up to which of its messages
// every one of the named roles has acknowledged. A role without a consumer has
// acknowledged nothing.
func (s *Session) floors(ctx context.Context, of route, roles []string) (map[int]uint64, error) {
	stream, err := s.js.Stream(ctx, of.name())
	if err != nil {
		return nil, err
	}
	byRole, err := consumerFloors(ctx, stream)
	if err != nil {
		return nil, err
	}
	floors := map[int]uint64{}
	n, _ := strconv.Atoi(stream.CachedInfo().Config.Metadata[metaPartitions])
	for p := range n {
		for i, role := range roles {
			floor := byRole[roleAt{role, p}]
			if i == 0 || floor < floors[p] {
				floors[p] = floor
			}
		}
	}
	return floors, nil
}

// roleAt is one reader's place: a role and a partition.
type roleAt struct {
	role      string
	partition int
}

// floorOf is up to where a consumer has everything acknowledged. A replicated
// one may not know any more, before its first ack, that it began behind what
// an earlier one had.
func floorOf(info *jetstream.ConsumerInfo) uint64 {
	return max(info.AckFloor.Stream, max(info.Config.OptStartSeq, 1)-1)
}

// consumerFloors lists how far each reader of a stream has acknowledged.
func consumerFloors(ctx context.Context, stream jetstream.Stream) (map[roleAt]uint64, error) {
	floors := map[roleAt]uint64{}
	list := stream.ListConsumers(ctx)
	for info := range list.Info() {
		if at, ok := parseConsumer(info.Name); ok {
			floors[at] = max(floors[at], floorOf(info))
		}
	}
	return floors, list.Err()
}
