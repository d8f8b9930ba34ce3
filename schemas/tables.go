// Package schemas holds every table that crosses a process or a file: one Go
// struct a table, whose parquet tags are the only place where a column's name
// is spelled. The same struct gives the Arrow schema of the stream
// ([SchemaOf]), the Parquet schema of the dataset, and the rows between them
// ([Record], [Rows]).
//
// The partition columns run, drafter and shard are not fields: they travel in
// the record's [Envelope] and stand in the dataset's Hive paths.
package schemas

import "time"

// FormatVersion is the version of the dataset's layout and of these tables.
// A reader refuses a larger one.
const FormatVersion = 1

// The tables, by the name that they have in the stream, on disk and in SQL.
const (
	TableCapture    = "capture" // tokens and states together; only in the stream
	TableSequences  = "sequences"
	TableTokens     = "tokens"
	TableStates     = "states"
	TableDrafts     = "drafts"
	TableSlots      = "slots"
	TableRounds     = "rounds"
	TableSimilarity = "similarity"
	TableFaults     = "faults"
)

// FinishGiven is the finish_reason of a sequence that the target did not write.
const FinishGiven = "given"

// Sequence is one row of the table sequences.
type Sequence struct {
	SeqID        string            `parquet:"seq_id"`
	PromptLen    int32             `parquet:"prompt_len"` // tokens before the first generated one
	Length       int32             `parquet:"length"`     // tokens in all
	FinishReason string            `parquet:"finish_reason,dict"`
	Temperature  float32           `parquet:"temperature"`
	Tags         map[string]string `parquet:"tags"`
	Text         *string           `parquet:"text"` // NULL when redacted
	CreatedAt    time.Time         `parquet:"created_at,timestamp(microsecond)"`
}

// Token is one row of the table tokens.
type Token struct {
	SeqID    string `parquet:"seq_id,dict"`
	Pos      int32  `parquet:"pos"`
	TokenID  int32  `parquet:"token_id"`
	LossMask bool   `parquet:"loss_mask"`
	Turn     int32  `parquet:"turn"`
	Role     string `parquet:"role,dict"`
	// TargetArgmax is the target's most likely token for position Pos+1.
	TargetArgmax *int32 `parquet:"target_argmax"`
	// TargetLogprob is the target's log-probability of the token at Pos+1;
	// NULL at the last position.
	TargetLogprob *float32 `parquet:"target_logprob"`
}

// State is one row of the table states: state c of one token.
type State struct {
	SeqID string  `parquet:"seq_id,dict,zstd"`
	Pos   int32   `parquet:"pos,delta,zstd"`
	State int32   `parquet:"state,zstd"` // c: after c layers, before the final norm
	Norm  float32 `parquet:"norm,zstd"`  // L2
	// Vec is byte-stream split: its file's default codec is made for that.
	Vec []float32 `parquet:"vec,list" parquet-element:",split"`
}

// Draft is one row of the table drafts: one block, drafted at one anchor.
type Draft struct {
	SeqID       string    `parquet:"seq_id,dict"`
	Anchor      int32     `parquet:"anchor"`
	DraftTokens []int32   `parquet:"draft_tokens,list"` // [B-1]
	TopIDs      []int32   `parquet:"top_ids,list"`      // [(B-1)*K]
	TopLogprobs []float32 `parquet:"top_logprobs,list"` // [(B-1)*K]
}

// Slot is one row of the table slots. It has no list columns: it is scanned
// by the million.
type Slot struct {
	SeqID      string `parquet:"seq_id,dict"`
	Anchor     int32  `parquet:"anchor"`
	Slot       int32  `parquet:"slot"`  // k = 1..B-1, predicts token anchor+k
	Label      *int32 `parquet:"label"` // target's argmax at anchor+k-1
	DataToken  *int32 `parquet:"data_token"`
	DraftToken int32  `parquet:"draft_token"`
	// Hit is DraftToken == Label; NULL when the slot is unscored.
	Hit *bool `parquet:"hit"`
	// Rank is the label's rank in the draft, 0 = first; NULL from K on.
	Rank         *int32   `parquet:"rank"`
	CE           *float32 `parquet:"ce"` // −log q(label), nats
	KL           *float32 `parquet:"kl"` // Σ p log(p/q), nats
	RKL          *float32 `parquet:"rkl"`
	JSD          *float32 `parquet:"jsd"`
	TV           *float32 `parquet:"tv"`
	DraftLogprob float32  `parquet:"draft_logprob"`
	// LossMask is the mask of the slot's own token; NULL past the end.
	LossMask *bool `parquet:"loss_mask"`
}

// The methods of the table rounds.
const (
	MethodChain  = "chain"
	MethodDDTree = "ddtree"
)

// Round is one row of the table rounds: one round of simulated speculative
// decoding over the stored continuation.
type Round struct {
	SeqID     string `parquet:"seq_id,dict"`
	Method    string `parquet:"method,dict"`
	Budget    int32  `parquet:"budget"` // nodes without the root; B-1 for the chain
	Round     int32  `parquet:"round"`
	Anchor    int32  `parquet:"anchor"`
	Proposed  int32  `parquet:"proposed"`   // drafts put before the target
	Accepted  int32  `parquet:"accepted"`   // drafts accepted, no bonus
	AcceptLen int32  `parquet:"accept_len"` // Accepted + 1
	// Truncated rounds reached the stored end with more left to verify. They
	// are left out of every mean.
	Truncated bool `parquet:"truncated"`
}

// Similarity is one row of the table similarity: one token's state in two runs.
type Similarity struct {
	RunA   string   `parquet:"run_a,dict"`
	RunB   string   `parquet:"run_b,dict"`
	SeqID  string   `parquet:"seq_id,dict"`
	Pos    int32    `parquet:"pos"`
	State  int32    `parquet:"state"`
	Cosine *float32 `parquet:"cosine"` // NULL when a norm is zero
	RelL2  *float32 `parquet:"rel_l2"` // |a-b| / |a|; NULL when |a| is zero
	MaxAbs float32  `parquet:"max_abs"`
	NormA  float32  `parquet:"norm_a"`
	NormB  float32  `parquet:"norm_b"`
}

// Fault is one row of the table faults: a sequence that was set aside.
type Fault struct {
	SeqID  string    `parquet:"seq_id"`
	Chunk  int32     `parquet:"chunk"` // of the stream, -1 when not there yet
	Check  string    `parquet:"check,dict"`
	Detail string    `parquet:"detail"`
	At     time.Time `parquet:"at,timestamp(microsecond)"`
}
