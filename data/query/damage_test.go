//go:build cgo

package query

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/schemas"
)

// scored writes a dataset whose run r has one commit of results by drafter d
// for each of the sequences a and b.
func scored(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	ds, err := data.Create(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer ds.Close()
	if err := ds.AddRun(data.Run{Name: "r", Target: "demo", States: []int{0}, Layers: 1, Hidden: 4, FinalNorm: data.FinalPreNorm, DType: schemas.F32, Engine: "test"}); err != nil {
		t.Fatal(err)
	}
	if err := ds.AddDrafter("r", data.Drafter{Name: "d"}); err != nil {
		t.Fatal(err)
	}
	sink, err := ds.ResultSink("r", 0, data.SinkConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer sink.Close()
	for i, seq := range []string{"a", "b"} {
		var slots []schemas.Slot
		var drafts []schemas.Draft
		for k := range int32(50) {
			slots = append(slots, schemas.Slot{SeqID: seq, Anchor: 977 * k, Slot: 1, DraftToken: 31 * k, Hit: new(true)})
			drafts = append(drafts, schemas.Draft{SeqID: seq, Anchor: 977 * k, DraftTokens: []int32{31 * k, 7 * k}})
		}
		env := schemas.Envelope{Table: schemas.TableSlots, Run: "r", Drafter: "d"}
		recs := []arrow.Record{schemas.Record(memory.NewGoAllocator(), env, slots)}
		env.Table = schemas.TableDrafts
		recs = append(recs, schemas.Record(memory.NewGoAllocator(), env, drafts))
		env.Table = schemas.TableRounds
		recs = append(recs, schemas.Record(memory.NewGoAllocator(), env, []schemas.Round{{SeqID: seq, Method: schemas.MethodChain, Budget: 1, AcceptLen: 2, Accepted: 1}}))
		for _, rec := range recs {
			if err := sink.Write(t.Context(), seq, rec); err != nil {
				t.Fatal(err)
			}
			rec.Release()
		}
		if err := sink.End(t.Context(), seq, uint64(i+1)); err != nil {
			t.Fatal(err)
		}
		if err := sink.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestADamagedCommitIsNamedAndCountedNowhere(t *testing.T) {
	const part = "run=r/drafter=d/part-00-000000000001-000000000001.parquet"
	flip := func(path string) error {
		b, err := os.ReadFile(path)
		if err == nil {
			b[len(b)/4] ^= 1
			err = os.WriteFile(path, b, 0o644)
		}
		return err
	}
	for _, c := range []struct {
		table, reason string
		spoil         func(string) error
	}{
		{"slots", "its content has digest", flip},
		{"drafts", "its content has digest", flip},
		{"rounds", "its content has digest", flip},
		{"rounds", "no Parquet footer", func(path string) error { return os.Truncate(path, 90) }},
		{"slots", "listed by rounds/" + part + " and missing; restore it, or delete rounds/" + part + " and run the command that made it again", os.Remove},
	} {
		dir := scored(t)
		if err := c.spoil(filepath.Join(dir, c.table, filepath.FromSlash(part))); err != nil {
			t.Fatal(err)
		}
		db := openDB(t, dir)
		wantRows(t, db, 0, "SELECT seq_id, count(*) FROM slots GROUP BY ALL", row("b", int64(50)))
		wantRows(t, db, 0, "SELECT seq_id FROM rounds", row("b"))
		found := false
		for _, w := range db.Warnings() {
			found = found || w.File == c.table+"/"+part && strings.Contains(w.Reason, c.reason)
		}
		if !found || len(db.Warnings()) != 3 {
			t.Errorf("%s: warnings %v, want 3 and one of %s with %q", c.table, db.Warnings(), c.table, c.reason)
		}
	}
	if w := openDB(t, scored(t)).Warnings(); len(w) != 0 {
		t.Errorf("warnings of a whole dataset: %v", w)
	}
}
