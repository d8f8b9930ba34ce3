package pipeline

import (
	"sync/atomic"
	"time"
)

// Progress says how far a run is. The numbers are of this invocation and of
// what it found left over by earlier ones, so that Stored can be more than
// Published.
type Progress struct {
	Published int64 // sequences that the source gave, whole
	Rows      int64 // of their records
	Bytes     int64 // of their payloads

	Processed     int64 // sequences that went through the stage
	ProcessedRows int64 // including those of sequences not yet ended
	ResultBytes   int64 // payload of what the stage emitted

	Stored        int64 // sequences of the capture that are durable
	ResultsStored int64 // sequences whose results are durable
	Faults        int64 // sequences set aside

	Shed     int64 // sequences that the source gave and that were dropped: the stream was full
	ShedRows int64 // of them
	Leases   int64 // partitions held by this worker
}

// Lag is how many sequences are in the stream and not durable yet.
func (p Progress) Lag() int64 { return max(0, p.Published-p.Stored-p.Faults) }

// Commit is one call of [Sink].Commit that succeeded.
type Commit struct {
	Stream    string // [CaptureStream] or [ResultsStream]
	Group     string
	Partition int
	Sequences int
	Bytes     int64 // that were pending
	Took      time.Duration
}

// Summary is what a run came to.
type Summary struct {
	Progress
	Drained    bool // ended early, on request
	Partitions int  // in force
}

type counters struct {
	published, rows, bytes                atomic.Int64
	processed, processedRows, resultBytes atomic.Int64
	stored, resultsStored, faults         atomic.Int64
	shed, shedRows, leases                atomic.Int64
}

func (c *counters) snapshot() Progress {
	return Progress{
		Published: c.published.Load(), Rows: c.rows.Load(), Bytes: c.bytes.Load(),
		Processed: c.processed.Load(), ProcessedRows: c.processedRows.Load(), ResultBytes: c.resultBytes.Load(),
		Stored: c.stored.Load(), ResultsStored: c.resultsStored.Load(), Faults: c.faults.Load(),
		Shed: c.shed.Load(), ShedRows: c.shedRows.Load(), Leases: c.leases.Load(),
	}
}
