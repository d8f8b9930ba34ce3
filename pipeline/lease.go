package pipeline

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// leaseBucket is the key-value bucket that says who works on what. Its keys
// live for [Config.LeaseTTL] unless they are renewed.
const leaseBucket = "draftscope_leases"

var errLeaseLost = errors.New("lease lost")

// lease is a key that one process holds. It is renewed under its revision, so
// that the server itself refuses a holder that came too late.
type lease struct {
	key      string
	revision uint64
	renewed  time.Time // when the last request that was granted was sent
}

// leases are the leases of one process.
type leases struct {
	js      jetstream.JetStream
	kv      jetstream.KeyValue
	stream  jetstream.Stream
	id      string
	ttl     time.Duration
	timeout time.Duration // of a request
}

func (s *Session) openLeases(ctx context.Context, id string) (book *leases, err error) {
	err = s.patiently(ctx, func(ctx context.Context) error {
		book, err = s.findLeases(ctx, id)
		return err
	})
	return book, err
}

func (s *Session) findLeases(ctx context.Context, id string) (*leases, error) {
	kv, err := openBucket(ctx, s.js, jetstream.KeyValueConfig{
		Bucket: leaseBucket, Description: "who works on which partition of which run", Replicas: s.cfg.Replicas,
		LimitMarkerTTL: time.Second, // allows keys their own TTL
	})
	if err != nil {
		return nil, err
	}
	stream, err := s.js.Stream(ctx, "KV_"+leaseBucket)
	if err != nil {
		return nil, fmt.Errorf("opening the bucket %s: %w", leaseBucket, err)
	}
	return &leases{js: s.js, kv: kv, stream: stream, id: id, ttl: s.cfg.LeaseTTL, timeout: s.cfg.LeaseTTL / 4}, nil
}

// acquire takes a free key. It returns nil when another holds it.
func (b *leases) acquire(ctx context.Context, key string) (*lease, error) {
	ctx, cancel := context.WithTimeout(ctx, b.timeout)
	defer cancel()
	l := &lease{key: key, renewed: time.Now()}
	var err error
	l.revision, err = b.kv.Create(ctx, key, []byte(b.id), jetstream.KeyTTL(b.ttl))
	if errors.Is(err, jetstream.ErrKeyExists) {
		// Ours, if the answer to an earlier request was lost.
		if e, err := b.kv.Get(ctx, key); err == nil && string(e.Value()) == b.id {
			l.revision, l.renewed = e.Revision(), time.Now().Add(-b.ttl/2)
			return l, nil
		}
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("taking the lease %s: %w", key, err)
	}
	return l, nil
}

// renew keeps a lease for another TTL. The error is errLeaseLost when another
// has it; any other leaves it as it was, until it expires.
func (b *leases) renew(ctx context.Context, l *lease) error {
	ctx, cancel := context.WithTimeout(ctx, b.timeout)
	defer cancel()
	sent := time.Now()
	msg := &nats.Msg{Subject: "$KV." + leaseBucket + "." + l.key, Data: []byte(b.id)}
	ack, err := b.js.PublishMsg(ctx, msg, jetstream.WithExpectLastSequencePerSubject(l.revision), jetstream.WithMsgTTL(b.ttl))
	if err == nil {
		l.revision, l.renewed = ack.Sequence, sent
		return nil
	}
	if apiCode(err) == 0 {
		return err
	}
	e, getErr := b.kv.Get(ctx, l.key)
	switch {
	case getErr == nil && string(e.Value()) == b.id: // the answer to an earlier renewal was lost
		l.revision, l.renewed = e.Revision(), time.Now().Add(-b.ttl/2)
		return nil
	case getErr == nil, errors.Is(getErr, jetstream.ErrKeyNotFound):
		return errLeaseLost
	}
	return err
}

// due says that it is time to renew.
func (b *leases) due(l *lease) bool { return time.Since(l.renewed) > b.ttl/4 }

// expired says that another may hold it by now.
func (b *leases) expired(l *lease) bool { return time.Since(l.renewed) > b.ttl }

// release gives a lease up, under its revision, so that one that is another's
// already is not touched.
func (b *leases) release(ctx context.Context, l *lease) error {
	ctx, cancel := context.WithTimeout(ctx, b.timeout)
	defer cancel()
	return b.kv.Purge(ctx, l.key, jetstream.LastRevision(l.revision), jetstream.PurgeTTL(time.Second))
}

// holders lists the last tokens of the keys below prefix. One that was given
// up may be in it for a second longer.
func (b *leases) holders(ctx context.Context, prefix string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, b.timeout)
	defer cancel()
	subject := "$KV." + leaseBucket + "." + prefix + "."
	info, err := b.stream.Info(ctx, jetstream.WithSubjectFilter(subject+"*"))
	if err != nil {
		return nil, err
	}
	var names []string
	for s := range info.State.Subjects {
		names = append(names, strings.TrimPrefix(s, subject))
	}
	return names, nil
}
