package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/draftscope/draftscope/pipeline"
)

const deleteHelp = `usage: draftscope delete --nats URL --run R --sequence S [--sequence S...]
       draftscope delete --nats URL --run R --group G

Removes sequences from the streams of a run on a server: their captures, and
what every group of workers made of them. A note stays, so that readers count
them as deleted and not as missing, and a source that is resumed does not send
them again. What a dataset holds already is not touched.

With --group it removes a group of workers and the streams of its results: a
source and the end of a run no longer wait for it. Stop its workers before.

examples:
  draftscope delete --nats nats://host:4222 --run r1 --sequence p0007
  draftscope delete --nats nats://host:4222 --run r1 --sequence p0007 --sequence p0008 --json
  draftscope delete --nats nats://host:4222 --run r1 --group auto-5a3c9b01
`

// stringsFlag may be given several times.
type stringsFlag []string

func (v *stringsFlag) String() string { return "" }

func (v *stringsFlag) Set(s string) error {
	*v = append(*v, s)
	return nil
}

// deletedSequences is what was removed.
type deletedSequences struct {
	Run     string              `json:"run"`
	Deleted []pipeline.Deletion `json:"deleted"`
	Group   string              `json:"group,omitempty"`
}

func cmdDelete(ctx context.Context, args []string, out streams) (err error) {
	flags := newFlags("delete", deleteHelp, out)
	nats := flags.String("nats", "", "the JetStream server's `URL`")
	run := flags.String("run", "", "the `NAME` of the run")
	var sequences stringsFlag
	flags.Var(&sequences, "sequence", "the `ID` of a sequence; give it once for each")
	group := flags.String("group", "", "the `NAME` of a group of workers, as inspect --nats shows it")
	asJSON := flags.Bool("json", false, "print JSON")
	if err := parseNone(flags, args); err != nil {
		return err
	}
	if err := needServer(*nats); err != nil {
		return err
	}
	if *run == "" || (len(sequences) == 0) == (*group == "") {
		return badUsage("delete needs --run NAME and either --sequence ID or --group NAME; \"draftscope inspect --nats %s\" lists the runs", *nats)
	}
	session, err := pipeline.Open(ctx, pipeline.Config{Run: *run, URL: *nats})
	if err != nil {
		return jobError(err)
	}
	defer func() { err = errors.Join(err, session.Close()) }()
	done := deletedSequences{Run: *run, Deleted: []pipeline.Deletion{}, Group: *group}
	if *group != "" {
		if err := session.ForgetGroup(ctx, *group); err != nil {
			if errors.Is(err, pipeline.ErrNoGroup) {
				return badInput(err)
			}
			return jobError(err)
		}
		if !*asJSON {
			fmt.Fprintf(out.stdout, "run %s: group %s and the streams of its results deleted\n", *run, *group)
		}
	}
	for _, seq := range sequences {
		d, err := session.Delete(ctx, seq)
		if errors.Is(err, pipeline.ErrNoSequence) {
			return badInput(err)
		}
		if err != nil {
			return jobError(err)
		}
		done.Deleted = append(done.Deleted, d)
		if !*asJSON {
			fmt.Fprintf(out.stdout, "run %s: sequence %s deleted, %d messages of %s\n", *run, seq, d.Messages, strings.Join(d.Streams, ", "))
		}
	}
	if *asJSON {
		return writeJSON(out.stdout, done)
	}
	return nil
}
