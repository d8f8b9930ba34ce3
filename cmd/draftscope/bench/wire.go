package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/pipeline"
	"github.com/draftscope/draftscope/schemas"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// encode cuts records into frames.
func (b *bench) encode(context.Context) (int64, error) {
	f := pipeline.NewFramer(nil)
	rec := b.pool.record("0", 0, 0)
	defer rec.Release()
	return repeat(func() (n int64, err error) {
		err = f.Encode(rec, 2*messageBytes, func(fr pipeline.Frame) error {
			n += int64(len(fr.Payload))
			return nil
		})
		return n, err
	})
}

// decode reads one frame again and again, with or without its digest.
func (b *bench) decode(digest bool) func(context.Context) (int64, error) {
	return func(context.Context) (int64, error) {
		f := pipeline.NewFramer(nil)
		rec := b.pool.record("0", 0, 0)
		defer rec.Release()
		var frame pipeline.Frame
		err := f.Encode(rec, 2*messageBytes, func(fr pipeline.Frame) error {
			frame = fr
			frame.Payload = memory.NewGoAllocator().Allocate(len(fr.Payload)) // aligned, as a message is
			copy(frame.Payload, fr.Payload)
			return nil
		})
		if err != nil {
			return 0, err
		}
		read := f.Parse
		if digest {
			read = f.Decode
		}
		return repeat(func() (int64, error) {
			got, err := read(frame)
			if err != nil {
				return 0, err
			}
			got.Release()
			return int64(len(frame.Payload)), nil
		})
	}
}

// listen starts a server with JetStream on a port of its own.
func (b *bench) listen() (url string, stop func(), err error) {
	srv, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true,
		JetStream: true, StoreDir: filepath.Join(b.work, "server"),
		MaxPayload: 8 << 20, MaxPending: 64 << 20,
	})
	if err != nil {
		return "", nil, fmt.Errorf("setting up a NATS server: %w", err)
	}
	go srv.Start()
	stop = func() {
		srv.Shutdown()
		srv.WaitForShutdown()
	}
	if !srv.ReadyForConnections(10 * time.Second) {
		stop()
		return "", nil, errors.New("starting a NATS server: it did not answer on loopback")
	}
	return srv.ClientURL(), stop, nil
}

// coreNATS publishes messages of a frame's size to one subscriber, over TCP
// both ways. The subscriber is never more than a window behind: without
// JetStream nothing else would hold the publisher back.
func (b *bench) coreNATS(ctx context.Context) (n int64, err error) {
	url, stop, err := b.listen()
	if err != nil {
		return 0, err
	}
	defer stop()
	in, err := nats.Connect(url)
	if err != nil {
		return 0, fmt.Errorf("measuring core NATS: %w", err)
	}
	defer in.Close()
	out, err := nats.Connect(url)
	if err != nil {
		return 0, fmt.Errorf("measuring core NATS: %w", err)
	}
	defer out.Close()
	sub, err := in.SubscribeSync("bench")
	if err == nil {
		err = in.Flush()
	}
	if err != nil {
		return 0, fmt.Errorf("measuring core NATS: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	payload := make([]byte, b.pool.recordBytes())
	count := max(1, b.cfg.Bytes/int64(len(payload)))
	credit := make(chan struct{}, 32)
	sent := make(chan error, 1)
	go func() {
		sent <- func() error {
			for range count {
				select {
				case credit <- struct{}{}:
				case <-ctx.Done():
					return ctx.Err()
				}
				if err := out.Publish("bench", payload); err != nil {
					return err
				}
			}
			return out.Flush()
		}()
	}()
	b.clock.start()
	for range count {
		var m *nats.Msg
		if m, err = sub.NextMsgWithContext(ctx); err != nil {
			break
		}
		<-credit
		n += int64(len(m.Data))
	}
	b.clock.stop()
	cancel()
	if sendErr := <-sent; err == nil && n < count*int64(len(payload)) {
		err = sendErr
	}
	if err != nil {
		return n, fmt.Errorf("measuring core NATS: %w", err)
	}
	return n, nil
}

// bareJetStream is what a stream in a file costs when nothing of ours is in
// it: blocks of a message's size, published with a window of eight and read by
// one consumer without acknowledgements, over TCP.
func (b *bench) bareJetStream(ctx context.Context) (n int64, err error) {
	url, stop, err := b.listen()
	if err != nil {
		return 0, err
	}
	defer stop()
	var conns [2]*nats.Conn
	var js [2]jetstream.JetStream
	for i := range conns {
		if conns[i], err = nats.Connect(url); err != nil {
			return 0, fmt.Errorf("measuring bare JetStream: %w", err)
		}
		defer conns[i].Close()
		if js[i], err = jetstream.New(conns[i], jetstream.WithPublishAsyncMaxPending(8)); err != nil {
			return 0, fmt.Errorf("measuring bare JetStream: %w", err)
		}
	}
	s, err := js[0].CreateStream(ctx, jetstream.StreamConfig{Name: "bench", Subjects: []string{"bench"}, Storage: jetstream.FileStorage})
	if err != nil {
		return 0, fmt.Errorf("measuring bare JetStream: %w", err)
	}
	_, err = s.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "bench", AckPolicy: jetstream.AckNonePolicy})
	if err != nil {
		return 0, fmt.Errorf("measuring bare JetStream: %w", err)
	}
	in, err := js[1].Consumer(ctx, "bench", "bench")
	if err != nil {
		return 0, fmt.Errorf("measuring bare JetStream: %w", err)
	}
	payload := make([]byte, b.pool.recordBytes())
	count := max(1, b.cfg.Bytes/int64(len(payload)))
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	b.clock.start()
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		for range count {
			if _, err := js[0].PublishAsync("bench", payload, jetstream.WithStallWait(time.Minute)); err != nil || ctx.Err() != nil {
				cancel(err)
				return
			}
		}
	}()
	defer func() { <-sent }()
	read, err := in.Messages(jetstream.PullMaxMessages(8))
	if err != nil {
		cancel(err)
		return 0, fmt.Errorf("measuring bare JetStream: %w", err)
	}
	defer read.Stop()
	for range count {
		m, err := read.Next(jetstream.NextContext(ctx))
		if err != nil {
			cancel(err)
			return n, fmt.Errorf("measuring bare JetStream: %w", errors.Join(err, context.Cause(ctx)))
		}
		n += int64(len(m.Data()))
	}
	b.clock.stop()
	return n, nil
}

// source yields the pool's records, sequence after sequence.
type source struct {
	pool        *pool
	seqs        int
	number, row int
}

// sequences is how many sequences hold about that many bytes.
func (b *bench) sequences(bytes int64) int {
	return max(2, int(bytes/(b.pool.recordBytes()*recordsPerSeq)))
}

func (s *source) Next(context.Context) (string, arrow.Record, bool, error) {
	if s.number == s.seqs {
		return "", nil, false, io.EOF
	}
	seq := strconv.Itoa(s.number)
	if s.row < recordsPerSeq {
		s.row++
		return seq, s.pool.record(seq, s.number, s.row-1), false, nil
	}
	s.number, s.row = s.number+1, 0
	return seq, s.pool.closing(seq), true, nil
}

// through sends sequences through a pipeline. What starting the server and
// deleting its streams take is not measured.
func (b *bench) through(ctx context.Context, seqs int, url string, stage pipeline.NewStage, sink pipeline.NewSink) (n int64, err error) {
	session, err := pipeline.Open(ctx, pipeline.Config{
		Run: runName, URL: url, Dir: filepath.Join(b.work, "stream"),
		CommitBytes: commitBytes, MaxBytes: b.cfg.StreamBytes, Keep: pipeline.KeepAlways, Logger: b.cfg.Logger,
	})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, session.DeleteStreams(context.WithoutCancel(ctx)), session.Close()) }()
	b.clock.start()
	sum, err := session.Run(ctx, &source{pool: b.pool, seqs: seqs}, stage, sink)
	b.clock.stop()
	if err == nil && (sum.Faults > 0 || sum.Stored != int64(seqs)) {
		err = fmt.Errorf("%d of %d sequences were stored and %d set aside", sum.Stored, seqs, sum.Faults)
	}
	return int64(seqs) * recordsPerSeq * b.pool.recordBytes(), err
}

// stream sends states through a stream in a file, and drops them. Over TCP
// the server is one that listens, and every byte passes loopback twice.
func (b *bench) stream(tcp bool) func(context.Context) (int64, error) {
	return func(ctx context.Context) (int64, error) {
		url := pipeline.Embedded
		if tcp {
			u, stop, err := b.listen()
			if err != nil {
				return 0, err
			}
			defer stop()
			url = u
		}
		return b.through(ctx, b.sequences(b.cfg.Bytes), url, nil, dropping)
	}
}

// streamDrafter is stream with a second reader: a drafter that reads all.
func (b *bench) streamDrafter(ctx context.Context) (int64, error) {
	return b.through(ctx, b.sequences(b.cfg.Bytes), pipeline.Embedded, newStub, dropping)
}

// readAll is what the stub does without a stream.
func (b *bench) readAll(context.Context) (int64, error) {
	i := 0
	return repeat(func() (int64, error) {
		s := b.pool.raw[i%len(b.pool.raw)]
		i++
		if sum(s) == 1 {
			return 0, errors.New("the states are not those that were made")
		}
		return int64(len(s)), nil
	})
}

// stub stands for a drafter that does nothing but read every state it gets.
type stub struct{ total uint64 }

func newStub(int) (pipeline.Stage, error) { return &stub{}, nil }

func (s *stub) Process(_ context.Context, _ string, rec arrow.Record, _ func(arrow.Record) error) error {
	env, err := schemas.EnvelopeOf(rec)
	if err != nil || env.Table != schemas.TableCapture {
		return err
	}
	c, err := schemas.ReadCapture(rec)
	if err != nil {
		return err
	}
	for _, raw := range c.States {
		s.total += sum(raw)
	}
	return nil
}

func (s *stub) End(_ context.Context, seq string, emit func(arrow.Record) error) error {
	rec := schemas.Record(memory.NewGoAllocator(), schemas.Envelope{Table: schemas.TableFaults, Run: runName}, []schemas.Fault{{SeqID: seq, Detail: strconv.FormatUint(s.total, 16)}})
	defer rec.Release()
	return emit(rec)
}

func (s *stub) Drop(string) {}

// sum reads b, eight bytes at a time.
func sum(b []byte) uint64 {
	var s0, s1, s2, s3 uint64
	for ; len(b) >= 32; b = b[32:] {
		s0 += binary.LittleEndian.Uint64(b)
		s1 += binary.LittleEndian.Uint64(b[8:])
		s2 += binary.LittleEndian.Uint64(b[16:])
		s3 += binary.LittleEndian.Uint64(b[24:])
	}
	return s0 + s1 + s2 + s3
}

// dropping makes sinks that keep nothing.
func dropping(string, int) (pipeline.Sink, error) { return &dropSink{}, nil }

type dropSink struct{ pending int64 }

func (d *dropSink) Write(_ context.Context, _ string, rec arrow.Record) error {
	for _, c := range rec.Columns() {
		for _, b := range c.Data().Buffers() {
			if b != nil {
				d.pending += int64(b.Len())
			}
		}
	}
	return nil
}
func (d *dropSink) End(context.Context, string, uint64) error { return nil }
func (d *dropSink) Drop(string)                               {}
func (d *dropSink) Pending() int64                            { return d.pending }
func (d *dropSink) Commit(context.Context) error              { d.pending = 0; return nil }
func (d *dropSink) Close() error                              { return nil }
