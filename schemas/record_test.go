package schemas

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/google/go-cmp/cmp"
)

// checked is an allocator that fails the test when something is left of it.
func checked(t *testing.T) memory.Allocator {
	mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
	t.Cleanup(func() { mem.AssertSize(t, 0) })
	return mem
}

// at has microseconds, the stream's unit.
var at = time.Date(2026, 3, 4, 5, 6, 7, 890_123_000, time.UTC)

// testRoundTrip sends rows through a record and back, whole and sliced.
func testRoundTrip[T any](name string, rows ...T) (string, func(*testing.T)) {
	return name, func(t *testing.T) {
		env := Envelope{Table: name, Run: "r1", Drafter: "good"}
		rec := Record(checked(t), env, rows)
		defer rec.Release()
		if got, err := EnvelopeOf(rec); err != nil || got != env {
			t.Errorf("envelope %+v, %v; want %+v", got, err, env)
		}
		got, err := Rows[T](rec)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(rows, got); diff != "" {
			t.Errorf("rows (-want +got):\n%s", diff)
		}
		for lo := range rows {
			slice := rec.NewSlice(int64(lo), int64(len(rows)))
			got, err := Rows[T](slice)
			slice.Release()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(rows[lo:], got); diff != "" {
				t.Errorf("rows from %d on (-want +got):\n%s", lo, diff)
			}
		}
		empty := Record(checked(t), env, []T(nil))
		defer empty.Release()
		if got, err := Rows[T](empty); err != nil || len(got) != 0 {
			t.Errorf("an empty record gives %d rows, %v", len(got), err)
		}
	}
}

func TestEveryTableComesBack(t *testing.T) {
	t.Run(testRoundTrip(TableSequences,
		Sequence{SeqID: "p0", PromptLen: 3, Length: 9, FinishReason: "stop", Temperature: 0.5, Tags: map[string]string{"a": "1", "b": "", "": "2"}, Text: new("täxt"), CreatedAt: at},
		Sequence{SeqID: "p1", Tags: map[string]string{}, CreatedAt: time.Unix(0, 0).UTC()},
		Sequence{SeqID: "p2", Tags: map[string]string{"c": "3"}, Text: new(""), CreatedAt: at},
	))
	t.Run(testRoundTrip(TableTokens,
		Token{SeqID: "p0", Pos: 0, TokenID: 1, LossMask: true, Turn: 2, Role: "user", TargetArgmax: new(int32(7)), TargetLogprob: new(float32(-0.25))},
		Token{SeqID: "p0", Pos: 1, TokenID: -1},
	))
	t.Run(testRoundTrip(TableStates,
		State{SeqID: "p0", Pos: 1, State: 2, Norm: 5, Vec: []float32{3, 4}},
		State{SeqID: "p0", Vec: []float32{}},
		State{SeqID: "p1", Vec: []float32{-1}},
	))
	t.Run(testRoundTrip(TableDrafts,
		Draft{SeqID: "p0", Anchor: 4, DraftTokens: []int32{5, 6}, TopIDs: []int32{5, 1, 6, 2}, TopLogprobs: []float32{-1, -2, -3, -4}},
		Draft{SeqID: "p0", Anchor: 5, DraftTokens: []int32{}, TopIDs: []int32{}, TopLogprobs: []float32{}},
	))
	t.Run(testRoundTrip(TableSlots,
		Slot{
			SeqID: "p0", Anchor: 4, Slot: 1, Label: new(int32(2)), DataToken: new(int32(3)), DraftToken: 2, Hit: new(true), Rank: new(int32(0)),
			CE: new(float32(1)), KL: new(float32(2)), RKL: new(float32(3)), JSD: new(float32(4)), TV: new(float32(5)), DraftLogprob: -6, LossMask: new(false),
		},
		Slot{SeqID: "p0", Anchor: 4, Slot: 2, DraftToken: 9, Hit: new(false)},
		Slot{SeqID: "p1"},
	))
	t.Run(testRoundTrip(TableRounds,
		Round{SeqID: "p0", Method: MethodDDTree, Budget: 8, Round: 1, Anchor: 2, Proposed: 3, Accepted: 4, AcceptLen: 5, Truncated: true},
		Round{SeqID: "p0", Method: MethodChain},
	))
	t.Run(testRoundTrip(TableSimilarity,
		Similarity{RunA: "a", RunB: "b", SeqID: "p0", Pos: 1, State: 2, Cosine: new(float32(0.5)), RelL2: new(float32(0)), MaxAbs: 3, NormA: 4, NormB: 5},
		Similarity{RunA: "a", RunB: "b", SeqID: "p1"},
	))
	t.Run(testRoundTrip(TableFaults,
		Fault{SeqID: "p0", Chunk: -1, Check: "K1", Detail: "row 2", At: at},
		Fault{SeqID: "p1", At: at},
	))
}

func TestRowsOutliveTheirRecord(t *testing.T) {
	mem := checked(t)
	rec := Record(mem, Envelope{Table: TableDrafts, Run: "r"}, []Draft{{SeqID: "p0", TopIDs: []int32{1, 2, 3}}})
	rows, err := Rows[Draft](rec)
	if err != nil {
		t.Fatal(err)
	}
	for _, buf := range rec.Column(3).(*array.List).ListValues().Data().Buffers() {
		if buf != nil {
			clear(buf.Bytes())
		}
	}
	rec.Release()
	if diff := cmp.Diff([]int32{1, 2, 3}, rows[0].TopIDs); diff != "" {
		t.Errorf("the row is a view (-want +got):\n%s", diff)
	}
}

func TestAnotherTablesRecordIsRefused(t *testing.T) {
	rounds := Record(checked(t), Envelope{Table: TableRounds, Run: "r"}, []Round{{}})
	defer rounds.Release()
	if _, err := Rows[Slot](rounds); !errors.Is(err, ErrRecord) {
		t.Errorf("rounds read as slots: %v", err)
	}
	if _, err := Rows[Fault](rounds); !errors.Is(err, ErrRecord) {
		t.Errorf("rounds read as faults: %v", err)
	}
	fields := rounds.Schema().Fields()
	fields[1].Name = "metod"
	renamed := array.NewRecord(arrow.NewSchema(fields, nil), rounds.Columns(), 1)
	defer renamed.Release()
	if _, err := Rows[Round](renamed); !errors.Is(err, ErrRecord) || !strings.Contains(err.Error(), "metod") {
		t.Errorf("a renamed column: %v", err)
	}
}

func TestNULLInAColumnWithoutNULLIsRefused(t *testing.T) {
	b := array.NewRecordBuilder(checked(t), SchemaOf[Round](Envelope{Table: TableRounds, Run: "r"}))
	defer b.Release()
	for _, f := range b.Fields() {
		f.AppendNull()
	}
	rec := b.NewRecord()
	defer rec.Release()
	if _, err := Rows[Round](rec); !errors.Is(err, ErrRecord) || !strings.Contains(err.Error(), "NULL") {
		t.Errorf("a round of NULLs: %v", err)
	}
}

func TestAnEnvelopeIsRequiredAndOfThisFormat(t *testing.T) {
	rec := Record(checked(t), Envelope{Table: TableRounds, Run: "r"}, []Round{{}})
	defer rec.Release()
	for name, tt := range map[string]struct {
		md   map[string]string
		want error
	}{
		"none":            {nil, ErrRecord},
		"a newer format":  {map[string]string{"draftscope.table": "rounds", "draftscope.format": "2"}, ErrFormat},
		"no format":       {map[string]string{"draftscope.table": "rounds"}, ErrFormat},
		"format in words": {map[string]string{"draftscope.table": "rounds", "draftscope.format": "one"}, ErrFormat},
	} {
		md := arrow.MetadataFrom(tt.md)
		other := array.NewRecord(arrow.NewSchema(rec.Schema().Fields(), &md), rec.Columns(), 1)
		if _, err := EnvelopeOf(other); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
		other.Release()
	}
}

func TestTheFingerprintSeesColumnsOnly(t *testing.T) {
	a := Fingerprint(SchemaOf[Round](Envelope{Table: TableRounds, Run: "a"}))
	if b := Fingerprint(SchemaOf[Round](Envelope{Table: TableRounds, Run: "b", Drafter: "d"})); a != b {
		t.Errorf("the envelope changes the fingerprint: %s and %s", a, b)
	}
	seen := map[string]string{}
	base := arrow.Field{Name: "x", Type: arrow.PrimitiveTypes.Int32}
	for name, fields := range map[string][]arrow.Field{
		"base":     {base},
		"name":     {{Name: "y", Type: base.Type}},
		"type":     {{Name: "x", Type: arrow.PrimitiveTypes.Int64}},
		"nullable": {{Name: "x", Type: base.Type, Nullable: true}},
		"metadata": {{Name: "x", Type: base.Type, Metadata: arrow.NewMetadata([]string{"k"}, []string{"v"})}},
		"order":    {{Name: "y", Type: base.Type}, base},
		"order 2":  {base, {Name: "y", Type: base.Type}},
	} {
		f := Fingerprint(arrow.NewSchema(fields, nil))
		if other, dup := seen[f]; dup {
			t.Errorf("%s and %s have one fingerprint", name, other)
		}
		seen[f] = name
	}
	// What is stored stays readable only while this holds.
	if want := "1846e857225ccf64"; a != want {
		t.Errorf("the columns of rounds changed: fingerprint %s, want %s; raise FormatVersion", a, want)
	}
}
