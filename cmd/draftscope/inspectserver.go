package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/pipeline"
)

// serverFound is what a server holds of runs, beside what a dataset has of
// them.
type serverFound struct {
	Server string     `json:"server"`
	Runs   []runFound `json:"runs"`
}

type runFound struct {
	Run string `json:"run"`
	// Captured counts the sequences that are whole in the stream, or that a
	// store took out of it. Deleted are not among them.
	Captured int `json:"captured"`
	Deleted  int `json:"deleted"`
	// With a dataset: of the captured ones those that it holds, those that
	// faults are told of, and the rest.
	Dataset  string        `json:"dataset,omitempty"`
	Stored   int           `json:"stored"`
	SetAside int           `json:"set_aside"`
	Missing  int           `json:"missing"`
	Shed     int64         `json:"shed"` // before they were captured
	Streams  []streamFound `json:"streams"`
	survey   pipeline.Survey
}

type streamFound struct {
	Name     string           `json:"name"`
	Bytes    uint64           `json:"bytes"`
	Messages uint64           `json:"messages"`
	Replicas int              `json:"replicas"`
	Leader   string           `json:"leader,omitempty"`
	Lag      map[string]int64 `json:"lag"` // messages, by reader, over all partitions
}

// inspectServer asks a server for its runs, or the one named; dataset may be
// empty.
func inspectServer(ctx context.Context, nats, run, dataset string) (*serverFound, error) {
	if err := needServer(nats); err != nil {
		return nil, err
	}
	var ds *data.Dataset
	if dataset != "" {
		var err error
		if ds, err = data.Open(dataset); err != nil {
			return nil, dataError(err)
		}
		defer ds.Close()
	}
	board, err := pipeline.Open(ctx, pipeline.Config{Run: "inspect", URL: nats})
	if err != nil {
		return nil, jobError(err)
	}
	defer board.Close()
	ask, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	runs := []string{run}
	if run == "" {
		if runs, err = board.Runs(ask); err != nil {
			return nil, jobError(err)
		}
	}
	found := &serverFound{Server: nats, Runs: []runFound{}}
	for _, name := range runs {
		r, err := inspectRun(ask, nats, name, ds)
		if err != nil {
			return nil, err
		}
		found.Runs = append(found.Runs, r)
	}
	return found, nil
}

func inspectRun(ctx context.Context, nats, name string, ds *data.Dataset) (r runFound, err error) {
	session, err := pipeline.Open(ctx, pipeline.Config{Run: name, URL: nats})
	if err != nil {
		return r, jobError(err)
	}
	defer func() { err = errors.Join(err, session.Close()) }()
	r.Run = name
	if r.survey, err = session.Survey(ctx); err != nil {
		return r, jobError(err)
	}
	r.Shed = r.survey.Shed
	for _, s := range r.survey.Streams {
		f := streamFound{Name: s.Name, Bytes: s.Bytes, Messages: s.Messages, Replicas: s.Replicas, Leader: s.Leader, Lag: map[string]int64{}}
		for _, reader := range s.Readers {
			f.Lag[strings.TrimSpace(reader.Role+" "+reader.Group)] += int64(reader.Lag)
		}
		r.Streams = append(r.Streams, f)
	}
	captured, err := session.Published(ctx)
	if err != nil {
		return r, jobError(err)
	}
	deleted, err := session.Deleted(ctx)
	if err != nil {
		return r, jobError(err)
	}
	for _, id := range deleted {
		delete(captured, id)
	}
	r.Captured, r.Deleted = len(captured), len(deleted)
	if ds == nil {
		return r, nil
	}
	r.Dataset = ds.Dir()
	stored, err := ds.Stored(name)
	if err != nil && !errors.Is(err, data.ErrUnknownRun) {
		return r, dataError(err)
	}
	aside := map[string]bool{}
	if err == nil {
		faults, err := ds.Faults(name)
		if err != nil {
			return r, dataError(err)
		}
		for _, f := range faults {
			aside[f.SeqID] = true
		}
	}
	for id := range captured {
		_, have := stored[id]
		switch {
		case have:
			r.Stored++
		case aside[id]:
			r.SetAside++
		default:
			r.Missing++
		}
	}
	return r, nil
}

// String says it in plain words.
func (f *serverFound) String() string {
	var b strings.Builder
	if len(f.Runs) == 0 {
		fmt.Fprintf(&b, "%s: no run\n", f.Server)
	}
	for _, r := range f.Runs {
		fmt.Fprintf(&b, "run %s on %s: %d sequences captured", r.Run, f.Server, r.Captured)
		if r.Dataset != "" {
			fmt.Fprintf(&b, ", of which %s has %d stored, %d set aside, %d missing", r.Dataset, r.Stored, r.SetAside, r.Missing)
		}
		if r.Deleted > 0 {
			fmt.Fprintf(&b, "; %d deleted", r.Deleted)
		}
		b.WriteString("\n")
		writeSurvey(&b, r.survey)
	}
	return b.String()
}
