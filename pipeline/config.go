package pipeline

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/apache/arrow/go/v17/arrow/memory"
)

// Embedded is the URL of the server that runs inside this process.
const Embedded = "embedded"

// Keep says what becomes of a run's streams after a run that succeeded. A run
// that failed or was cancelled always leaves them: they are what it resumes
// from.
type Keep int

// The choices.
const (
	KeepDefault Keep = iota // deleted on the embedded server, kept on any other
	KeepAlways
	KeepNever
)

// WhenFull is what happens when a stream of limited size is full.
type WhenFull int

// The choices.
const (
	// Block makes the source wait until readers have made room.
	Block WhenFull = iota
	// Shed drops the sequences that begin while the stream is half full or
	// fuller, and gives up one that has begun when readers make no room for it
	// within a second: whole, and counted.
	Shed
)

// Config is what a run's pipeline depends on. Run and, for the embedded
// server, Dir are needed; every other zero value is the default named beside
// it.
type Config struct {
	Run string // names the streams; the same name resumes
	URL string // of the NATS server; empty or [Embedded] runs one in this process
	Dir string // file store of the embedded server

	Partitions int // sequences that are worked on side by side; 2. A stream that exists keeps its own number
	ChunkBytes int // target of a message's payload; 1,000,000 or what the server takes, whichever is less
	Window     int // messages sent and not yet acknowledged, per stream; 8

	// MaxBytes caps each stream on disk; 0 is no cap. With a cap a stream
	// forgets what all of its readers have acknowledged, and publishing
	// waits while it is more than 70 % full.
	MaxBytes int64
	// SoftBytes is about how much each stream holds on disk, and an embedded
	// server in memory, without being a limit of the server's: it forgets
	// what all of its readers have acknowledged, sinks are asked to commit
	// when it is full, and publishing waits for them. What is in progress is
	// let through, however long: it cannot be acknowledged before its end. 0
	// is what [Session.NoteSoftBytes] has left in the server for the roles,
	// else no such bound. With MaxBytes it is not looked at.
	SoftBytes int64
	// MaxAge lets a stream forget what is older, whether or not it was read;
	// 0 is never.
	MaxAge time.Duration
	// WhenFull says what a source is told while the stream is full.
	WhenFull WhenFull
	// Replicas of each stream and of the leases in a cluster; 0 is 1, or what
	// the streams of the run have already.
	Replicas int

	// Once ends Work and Store when all that the run's source published is
	// through, instead of waiting for more.
	Once bool
	// Groups is how many groups of workers a Store with Once waits for at
	// least.
	Groups int
	// LeaseTTL is how long a worker that does not answer keeps its
	// partitions; 5 s, and at least 1 s.
	LeaseTTL time.Duration

	CommitBytes     int64         // a sink commits when that much is pending; 64 MiB
	CommitSequences int           // or that many sequences have ended; 1024
	CommitIdle      time.Duration // or nothing came for that long; 1 s

	AckWait        time.Duration // after which the server thinks a reader dead; 5 min. Readers send signs of life at a third of it
	ConnectTimeout time.Duration // to reach the server at start; 5 s
	OutageTimeout  time.Duration // how long a lost server is waited for; 1 min

	SyncAlways bool // the embedded server syncs every message: survives a crash of the machine, at half the speed
	MaxPayload int  // of the embedded server; 8 MiB
	Keep       Keep
	// Server, when set, is reached within the process; URL is only shown.
	Server *Server

	// Drain, once closed, ends the run early but well: the sequence at hand
	// is finished, no new one is asked for, all that was published is stored.
	Drain <-chan struct{}
	// OnFault hears of each sequence that was set aside. It is called from
	// one goroutine at a time.
	OnFault func(Fault)
	// OnCommit hears of each Commit of a sink, from several goroutines.
	OnCommit func(Commit)

	Logger    *slog.Logger     // silent when nil
	Allocator memory.Allocator // of decoded records; Go's when nil

	ackTimeout time.Duration // after which a message without an answer counts as lost; 10 s, tests lower it
	storeLimit int64         // bytes the embedded server may use; tests lower it
}

func or[T comparable](v *T, otherwise T) {
	var zero T
	if *v == zero {
		*v = otherwise
	}
}

func (c Config) withDefaults() Config {
	or(&c.URL, Embedded)
	or(&c.Partitions, 2)
	or(&c.Window, 8)
	or(&c.CommitBytes, 64<<20)
	or(&c.CommitSequences, 1024)
	or(&c.CommitIdle, time.Second)
	or(&c.AckWait, 5*time.Minute)
	or(&c.ConnectTimeout, 5*time.Second)
	or(&c.OutageTimeout, time.Minute)
	or(&c.MaxPayload, 8<<20)
	or(&c.LeaseTTL, 5*time.Second)
	or(&c.ackTimeout, 10*time.Second)
	or(&c.storeLimit, 1<<50)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Allocator == nil {
		c.Allocator = memory.NewGoAllocator()
	}
	return c
}

// Validate reports everything about c that cannot work.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrConfig}, args...)...))
	}
	if err := checkRunName(c.Run); err != nil {
		errs = append(errs, err)
	}
	if c.URL == Embedded && c.Dir == "" && c.Server == nil {
		bad("the embedded server needs a directory for its store")
	}
	if c.Partitions < 1 || c.Partitions > 256 {
		bad("%d partitions, 1 to 256 are possible", c.Partitions)
	}
	if c.Window < 1 || c.Window > 64 {
		bad("a window of %d messages, 1 to 64 are possible", c.Window)
	}
	if c.ChunkBytes < 0 || c.ChunkBytes > 64<<20 {
		bad("chunks of %d bytes, up to 64 MiB are possible", c.ChunkBytes)
	}
	if c.MaxPayload < minPayload || c.MaxPayload > 64<<20 {
		bad("max_payload of %d bytes, %d to 64 MiB are possible", c.MaxPayload, minPayload)
	}
	if c.LeaseTTL < time.Second {
		bad("a lease of %s, at least 1 s is possible", c.LeaseTTL)
	}
	if c.Replicas < 0 || c.Replicas > 5 {
		bad("%d replicas, 1 to 5 are possible", c.Replicas)
	}
	if c.WhenFull == Shed && c.MaxBytes == 0 {
		bad("shedding needs a limit to the stream's size")
	}
	if c.MaxBytes < 0 || c.SoftBytes < 0 || c.MaxAge < 0 || c.CommitBytes < 0 || c.CommitSequences < 0 {
		bad("negative size")
	}
	if c.MaxAge > 0 && c.MaxAge < 100*time.Millisecond {
		bad("an age limit (max-age) of %s, at least 100 ms is possible", c.MaxAge)
	}
	if c.CommitIdle < 0 || c.AckWait < 0 || c.ConnectTimeout < 0 || c.OutageTimeout < 0 {
		bad("negative duration")
	}
	return errors.Join(errs...)
}
