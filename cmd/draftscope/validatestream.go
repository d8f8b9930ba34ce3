package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/apache/arrow/go/v17/arrow"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/extract/verify"
	"github.com/draftscope/draftscope/pipeline"
	"github.com/draftscope/draftscope/schemas"
)

// validateServer checks the streams of the runs on a server, or of --run.
func (j *job) validateServer(ctx context.Context, v *validation) (err error) {
	runs := []string{j.run}
	label := j.run
	if label == "" {
		label = "validate" // only of the connection
	}
	board, err := pipeline.Open(ctx, pipeline.Config{Run: label, URL: j.nats, Logger: j.log})
	if err != nil {
		return jobError(err)
	}
	defer func() { err = errors.Join(err, board.Close()) }()
	if j.run == "" {
		if runs, err = board.Live(ctx); err != nil {
			return jobError(err)
		}
	}
	for _, run := range runs {
		if err := j.validateStreams(ctx, v, run); err != nil {
			return err
		}
	}
	return nil
}

func (j *job) validateStreams(ctx context.Context, v *validation, run string) (err error) {
	session, err := pipeline.Open(ctx, pipeline.Config{Run: run, URL: j.nats, Logger: j.log})
	if err != nil {
		return jobError(err)
	}
	defer func() { err = errors.Join(err, session.Close()) }()
	record, ok, err := runRecord(ctx, session)
	if err != nil {
		return jobError(err)
	}
	s := &streamChecks{
		ctx: ctx, v: v, checks: &checks{v: v, run: data.Run{Name: run}, file: "run " + run}, job: j,
		open: map[string]*gathered{}, digests: map[string]uint64{}, tokens: map[string][]schemas.Token{},
	}
	if ok { // a job of one process describes its run in its dataset only
		s.checks = j.checksOf(v, record, s.file)
	}
	found, err := session.Scan(ctx, s)
	if err != nil {
		return jobError(err)
	}
	for _, id := range found.Unended {
		v.add(verify.Fault{File: "run " + run, Sample: id, Row: -1, State: -1, Rule: "K15", Value: "begun, and not whole in the stream: on its way, or given up", Warning: true})
	}
	j.say("run %s: %d messages in %d streams read", run, found.Messages, found.Streams)
	return nil
}

// streamChecks put the messages of one run to the checks of a dataset.
type streamChecks struct {
	ctx context.Context
	v   *validation
	job *job
	*checks

	open    map[string]*gathered       // of the captures, by sequence
	digests map[string]uint64          // of those that ended
	tokens  map[string][]schemas.Token // the same, for the results
}

// ruleOfMessage is the rule that a message, or its place, breaks.
func ruleOfMessage(check string) string {
	switch check {
	case "header", "frame", "digest":
		return "K21"
	case "order", "count", "missing":
		return "K15"
	}
	return check
}

// Fault implements [pipeline.Scanner].
func (s *streamChecks) Fault(o pipeline.Origin, f pipeline.Fault) {
	value := f.Detail
	if f.Chunk >= 0 {
		value = fmt.Sprintf("chunk %d: %s", f.Chunk, f.Detail)
	}
	if f.Seq != "" && o.Stream == pipeline.CaptureStream {
		s.v.Samples++
	}
	s.v.add(verify.Fault{File: "stream " + o.Name, Sample: f.Seq, Row: -1, State: -1, Rule: ruleOfMessage(f.Check), Value: value})
}

// Record implements [pipeline.Scanner].
func (s *streamChecks) Record(o pipeline.Origin, seq string, rec arrow.Record) error {
	env, err := schemas.EnvelopeOf(rec)
	if err == nil && env.Run != s.run.Name {
		err = fmt.Errorf("a record of run %q", env.Run)
	}
	if err == nil && o.Stream == pipeline.CaptureStream {
		s.learn(rec)
		g := s.open[seq]
		if g == nil {
			g = s.begin(seq)
			s.open[seq] = g
		}
		err = g.take(rec)
	} else if err == nil {
		err = s.result(o, seq, env.Table, rec)
	}
	if err != nil {
		s.v.add(verify.Fault{File: "stream " + o.Name, Sample: seq, Row: -1, State: -1, Rule: "K21", Value: err.Error()})
	}
	return nil
}

// learn takes what a run records from its first states, where the server has
// no description of it.
func (s *streamChecks) learn(rec arrow.Record) {
	if s.run.States != nil {
		return
	}
	if c, err := schemas.ReadCapture(rec); err == nil {
		r := s.run
		r.States, r.Layers, r.Hidden, r.DType = c.Spec.States, c.Spec.Layers, c.Spec.Hidden, c.Spec.DType
		s.checks = s.job.checksOf(s.v, r, s.file)
	}
}

// Drop implements [pipeline.Scanner].
func (s *streamChecks) Drop(o pipeline.Origin, seq string) {
	if o.Stream == pipeline.CaptureStream {
		delete(s.open, seq)
	}
}

// End implements [pipeline.Scanner].
func (s *streamChecks) End(o pipeline.Origin, seq string) error {
	if o.Stream != pipeline.CaptureStream {
		return nil
	}
	g := s.open[seq]
	delete(s.open, seq)
	if g == nil {
		g = s.begin(seq)
	}
	switch {
	case g.aside:
	case g.Length < 0:
		g.fault(-1, "K3", "it ended without its row of the table sequences")
	case g.Length == 0:
		g.fault(-1, "K3", "it has no tokens")
	}
	digest := g.digest()
	if before, again := s.digests[seq]; again {
		if before != digest {
			s.v.add(verify.Fault{File: s.file, Sample: seq, Row: -1, State: -1, Rule: "K15", Value: "came twice, and the second is another than the first"})
		}
		return nil
	}
	s.digests[seq] = digest
	s.tokens[seq] = g.Tokens
	return s.end(s.ctx, g)
}

// result holds rows that a drafter's work left in the stream against the rules
// that [resultChecks] has for a dataset.
func (s *streamChecks) result(o pipeline.Origin, seq, table string, rec arrow.Record) error {
	env, err := schemas.EnvelopeOf(rec)
	if err != nil {
		return err
	}
	type complaint struct{ rule, words string }
	counts, first := map[complaint]int{}, map[complaint]int{}
	var order []complaint
	note := func(anchor int32, rule, words string) {
		key := complaint{rule, words}
		if counts[key]++; counts[key] == 1 {
			order = append(order, key)
			first[key] = int(anchor)
		}
	}
	switch table {
	case schemas.TableSlots:
		rows, err := schemas.Rows[schemas.Slot](rec)
		if err != nil {
			return err
		}
		for _, r := range rows {
			masked := r.LossMask != nil && *r.LossMask
			switch {
			case r.Hit != nil && !masked:
				note(r.Anchor, "K10", unmaskedScored)
			case r.Hit == nil && masked && r.Label != nil:
				note(r.Anchor, "K10", maskedUnscored)
			}
			if r.Hit != nil && r.Label != nil && *r.Hit != (r.DraftToken == *r.Label) {
				note(r.Anchor, "K19", wrongHit)
			}
			if at := int(r.Anchor + r.Slot); r.DataToken != nil && at < len(s.tokens[seq]) && s.tokens[seq][at].TokenID != *r.DataToken {
				note(r.Anchor, "K4", otherText)
			}
		}
	case schemas.TableRounds:
		rows, err := schemas.Rows[schemas.Round](rec)
		if err != nil {
			return err
		}
		for _, r := range rows {
			if r.AcceptLen != r.Accepted+1 || r.Accepted > r.Proposed || r.Accepted < 0 {
				note(r.Anchor, "K19", wrongLength)
			}
		}
	case schemas.TableFaults:
		rows, err := schemas.Rows[schemas.Fault](rec)
		if err != nil {
			return err
		}
		for _, r := range rows {
			s.v.add(verify.Fault{File: "stream " + o.Name, Sample: r.SeqID, Row: -1, State: -1, Rule: r.Check, Value: "set aside: " + r.Detail})
		}
	}
	for _, c := range order {
		s.v.add(verify.Fault{File: "stream " + o.Name + " " + env.Drafter, Sample: seq, Row: first[c], State: -1, Rule: c.rule, Value: fmt.Sprintf("%d %s", counts[c], c.words)})
	}
	return nil
}

var _ pipeline.Scanner = (*streamChecks)(nil)
