// Package pipeline moves Arrow records through NATS JetStream: from a
// [Source], through a [Stage], into a [Sink]. It knows nothing of what is in
// them. [Open] finds the server, [Session.Run] does the work in one process.
//
//	Source ─▶ stream capture ─┬─▶ Sink          (one of each a partition)
//	                          └─▶ Stage ─▶ stream results ─▶ Sink
//
// The same roles as processes of their own, on any machines that reach the
// server, are [Session.Publish], [Session.Work] and [Session.Store]. Any
// number of workers share the partitions of a run by leases in the server;
// see Session.Work. [Session.DescribeRun] and [Session.DescribeGroup] carry
// what they have to tell each other.
//
// # The unit of truth is a sequence
//
// The records of a sequence travel in order on one partition, cut by rows
// into messages of about 1 MB and followed by an end marker
// that states how many chunks and rows there are and a digest over all of
// them. Nothing that is less than a whole, verified sequence counts:
//
//   - a stage's input is acknowledged once the server has all of the
//     sequence's results and their end marker;
//   - a sink's input is acknowledged after the Commit that made the sequence
//     durable;
//   - what is not acknowledged is delivered again to the next invocation.
//
// So delivery is at least once, and a sink that knows which sequences it has
// makes it exactly once.
//
// # What happens when it stops anywhere
//
// A process that dies (or is cancelled, or meets an error) while publishing
// leaves a sequence without an end. The next invocation sends it again under
// a new attempt, and readers drop the old one as soon as they see any message
// of the new invocation. Between the end marker and the acknowledgement of
// the stage: the stage does it again, its results get a new attempt, and the
// sink meets the sequence twice, once at most half. Between a sink's Commit
// and its acks: the sink meets what it has and skips it. Between two acks of
// one sequence: the rest of it arrives without its beginning, which only
// happens to what was done with, and is acknowledged.
//
// An attempt is named nonce.number; the nonce belongs to one invocation of
// Run, and invocations follow each other. Two at a time are noticed: each
// message names the one that its publisher sent before it, and the server
// refuses it if something else came between (the invocation that came first
// stops with [ErrAnotherWriter]).
//
// # Outages
//
// After a reconnect nothing is assumed. The publisher asks which message the
// stream has last, takes what is up to it for stored, reads the server's
// max_payload again, cuts again what no longer fits, and sends the rest. A
// reader makes a new consumer behind its last unbroken acknowledgement and
// forgets what it held; it does the same whenever a delivery number is
// missing, so that the order of a partition never depends on redelivery.
//
// # What is set aside
//
// A message that is damaged, missing or changed costs its sequence, not the
// run: [Config.OnFault] hears of it, the stage and the sink are told to drop
// it, the rest goes on. An error of the source, a stage or a sink ends the
// run, unless it wraps a [Fault].
//
// The layout of subjects, headers and payloads, for programs in other
// languages, is in docs/stream.md.
package pipeline
