//go:build cgo

package data

import (
	"bytes"
	"database/sql"
	"encoding/binary"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"

	_ "github.com/duckdb/duckdb-go/v2"

	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/schemas"
	"github.com/google/go-cmp/cmp"
)

// queryRows prints every row of a query's result.
func queryRows(t testing.TB, db *sql.DB, query string, args ...any) []string {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), query, args...)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	defer rows.Close()
	cols, err := rows.Columns()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for rows.Next() {
		vals := make([]any, len(cols))
		for i := range vals {
			vals[i] = new(any)
		}
		if err := rows.Scan(vals...); err != nil {
			t.Fatal(err)
		}
		line := ""
		var lineSb43 strings.Builder
		for i, v := range vals {
			if i > 0 {
				lineSb43.WriteString(" ")
			}
			fmt.Fprint(&lineSb43, *v.(*any))
		}
		line += lineSb43.String()
		out = append(out, line)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

// everyBf16 is a sample whose states run through all finite bf16 codes.
func everyBf16(run Run, id string) sample {
	s := newSample(run, id, 65536/run.Hidden)
	for i := range s.states {
		code := uint16(i)
		for j := 0; j < len(s.states[i]); j += 2 {
			if code&0x7f80 == 0x7f80 {
				binary.LittleEndian.PutUint16(s.states[i][j:], code&^0x4000) // no NaN, no Inf
			} else {
				binary.LittleEndian.PutUint16(s.states[i][j:], code)
			}
			code++
		}
	}
	// The square of the largest is past float32's range: keep norms finite.
	for i := range s.states {
		for j := 1; j < len(s.states[i]); j += 2 {
			if s.states[i][j]&0x7f > 0x5e {
				s.states[i][j] &^= 0x20
			}
		}
	}
	return s
}

func TestDuckDBReadsEveryColumnNatively(t *testing.T) {
	mem := memory.NewGoAllocator()
	run := testRun("r1", 64, schemas.BF16)
	d := mustCreate(t, t.TempDir(), run)
	if err := d.AddDrafter("r1", Drafter{Name: "good", Fingerprint: "f"}); err != nil {
		t.Fatal(err)
	}
	c, err := d.CaptureSink("r1", 3, SinkConfig{RowGroupBytes: 64 * 4 * 100})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	want := everyBf16(run, "p0000")
	want.sequence.Text = nil
	feed(t, c, "p0000", 7, want.records(t, mem, 64))
	small := newSample(run, "p0001", 5)
	feed(t, c, "p0001", 9, small.records(t, mem, 64))
	if err := c.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	r, err := d.ResultSink("r1", 3, SinkConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	feed(t, r, "p0001", 4, sampleResults("p0001", "good").records(mem, "r1"))
	if err := r.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}

	db, err := sql.Open("duckdb", "")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	table := func(name string) string {
		return fmt.Sprintf("read_parquet('%s', hive_partitioning = true)", filepath.Join(d.Dir(), name, "**", "*.parquet"))
	}
	for name, wantCols := range map[string][]string{
		"sequences": {"seq_id VARCHAR", "prompt_len INTEGER", "length INTEGER", "finish_reason VARCHAR", "temperature FLOAT", "tags MAP(VARCHAR, VARCHAR)", "text VARCHAR", "created_at TIMESTAMP WITH TIME ZONE", "run VARCHAR"},
		"tokens":    {"seq_id VARCHAR", "pos INTEGER", "token_id INTEGER", "loss_mask BOOLEAN", "turn INTEGER", "role VARCHAR", "target_argmax INTEGER", "target_logprob FLOAT", "run VARCHAR"},
		"states":    {"seq_id VARCHAR", "pos INTEGER", "state INTEGER", "norm FLOAT", "vec FLOAT[]", "run VARCHAR", "shard VARCHAR"},
		"drafts":    {"seq_id VARCHAR", "anchor INTEGER", "draft_tokens INTEGER[]", "top_ids INTEGER[]", "top_logprobs FLOAT[]", "drafter VARCHAR", "run VARCHAR"},
		"slots": {
			"seq_id VARCHAR", "anchor INTEGER", "slot INTEGER", "label INTEGER", "data_token INTEGER", "draft_token INTEGER", "hit BOOLEAN", "rank INTEGER", "ce FLOAT", "kl FLOAT",
			"rkl FLOAT", "jsd FLOAT", "tv FLOAT", "draft_logprob FLOAT", "loss_mask BOOLEAN", "drafter VARCHAR", "run VARCHAR",
		},
		"rounds": {"seq_id VARCHAR", "method VARCHAR", "budget INTEGER", "round INTEGER", "anchor INTEGER", "proposed INTEGER", "accepted INTEGER", "accept_len INTEGER", "truncated BOOLEAN", "drafter VARCHAR", "run VARCHAR"},
	} {
		got := queryRows(t, db, "select column_name || ' ' || column_type from (describe select * from "+table(name)+")")
		if diff := cmp.Diff(wantCols, got); diff != "" {
			t.Errorf("columns of %s (-want +got):\n%s", name, diff)
		}
	}

	t.Run("vectors are bit-equal", func(t *testing.T) {
		for i, state := range run.States {
			rows, err := db.QueryContext(t.Context(), "select unnest(vec) from (select vec from "+table("states")+" where seq_id = 'p0000' and state = ? order by pos)", state)
			if err != nil {
				t.Fatal(err)
			}
			defer rows.Close()
			var got []byte
			for rows.Next() {
				var v float32
				if err := rows.Scan(&v); err != nil {
					t.Fatal(err)
				}
				bits := math.Float32bits(v)
				if bits&0xffff != 0 {
					t.Fatalf("%g is no bf16", v)
				}
				got = binary.LittleEndian.AppendUint16(got, uint16(bits>>16))
			}
			if err := rows.Err(); err != nil || !bytes.Equal(got, want.states[i]) {
				t.Errorf("state %d: %d bytes differ from the %d captured (%v)", state, len(got), len(want.states[i]), err)
			}
		}
	})
	t.Run("NULL and maps", func(t *testing.T) {
		got := queryRows(t, db, "select seq_id, text, tags['kind'], tags['n'], created_at = ?::timestamptz from "+table("sequences")+" where seq_id = 'p0000'", want.sequence.CreatedAt)
		if diff := cmp.Diff([]string{"p0000 <nil> test 1024 true"}, got); diff != "" {
			t.Errorf("sequences (-want +got):\n%s", diff)
		}
		got = queryRows(t, db, "select count(*), count(hit), count(*) filter (hit), count(rank), count(kl), count(loss_mask) from "+table("slots"))
		if diff := cmp.Diff([]string{"9 6 3 3 0 6"}, got); diff != "" {
			t.Errorf("slots (-want +got):\n%s", diff)
		}
		got = queryRows(t, db, "select top_ids[1], len(top_ids), top_logprobs[2] from "+table("drafts")+" order by anchor limit 1")
		if diff := cmp.Diff([]string{"100 6 -2"}, got); diff != "" {
			t.Errorf("drafts (-want +got):\n%s", diff)
		}
	})
	t.Run("a row group holds one state", func(t *testing.T) {
		got := queryRows(t, db, "select count(*), count(*) filter (stats_min_value = stats_max_value) from parquet_metadata('"+filepath.Join(d.Dir(), "states", "**", "*.parquet")+"') where path_in_schema = 'state'")
		if diff := cmp.Diff([]string{"33 33"}, got); diff != "" {
			t.Errorf("row groups, and those of one state (-want +got):\n%s", diff)
		}
	})
	t.Run("footers", func(t *testing.T) {
		got := queryRows(t, db, "select decode(value) from parquet_kv_metadata('"+filepath.Join(d.Dir(), "sequences", "**", "*.parquet")+"') where decode(key) in ('draftscope.run', 'draftscope.rows', 'draftscope.first', 'draftscope.last') order by decode(key)")
		if diff := cmp.Diff([]string{"7", "9", "2", "r1"}, got); diff != "" {
			t.Errorf("footer (-want +got):\n%s", diff)
		}
	})
}
