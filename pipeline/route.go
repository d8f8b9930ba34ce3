package pipeline

import (
	"strconv"
	"strings"
)

// route is one stream of a run and the subjects in it.
//
// There is one capture stream a run, with every partition in it. The results
// of a job in one process go into one stream likewise. Workers of a group
// (see [Session.Work]) have a results stream for each partition: a stream has
// one publisher at a time, whose chain of message ids makes the server refuse
// what a worker sends that has lost the partition to another.
type route struct {
	run, stream string
	group       string // of results; empty for a job in one process
	partition   int    // of a group's results
}

func (r route) name() string {
	name := "DS_" + escapeToken(r.run) + "_" + r.stream
	if r.group != "" {
		name += "_" + escapeGroup(r.group) + "_" + strconv.Itoa(r.partition)
	}
	return name
}

func (r route) subject(partition int) string {
	s := "ds." + escapeToken(r.run) + "." + r.stream + "." + strconv.Itoa(partition)
	if r.group != "" {
		s += "." + escapeGroup(r.group)
	}
	return s
}

// subjects is what the stream listens to.
func (r route) subjects() string {
	if r.group != "" {
		return r.subject(r.partition)
	}
	return "ds." + escapeToken(r.run) + "." + r.stream + ".*"
}

// escapeGroup is [escapeToken] without - and _, which part names in the names
// of streams and consumers.
func escapeGroup(s string) string {
	return strings.NewReplacer("-", "=2D", "_", "=5F").Replace(escapeToken(s))
}

// GroupStreamName is the JetStream name of the results of one partition by
// one group of workers.
func GroupStreamName(run, group string, partition int) string {
	return route{run, ResultsStream, group, partition}.name()
}

// GroupSubject is where a group's results of one partition are published.
func GroupSubject(run, group string, partition int) string {
	return route{run, ResultsStream, group, partition}.subject(partition)
}
