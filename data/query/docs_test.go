//go:build cgo

package query

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/data/query/querytest"
	"github.com/draftscope/draftscope/schemas"
)

func TestEveryQueryOfTheDocumentationIsAnswered(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join("..", "..", "docs", "metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	querytest.Random(t, dir, "r", 1, 4, 6, querytest.Drafter{Name: "d", Skill: .8, Decay: .9})
	querytest.Write(t, dir, "states/run=r/shard=00/p.parquet",
		schemas.State{SeqID: "p0000", State: 2, Norm: 5, Vec: []float32{3, 4}}, schemas.State{SeqID: "p0000", State: 5, Norm: 5, Vec: []float32{4, 3}})
	db := openDB(t, dir)
	if n := answers(t, db, string(doc)); n < 15 {
		t.Errorf("%d queries found, want at least 15", n)
	}
	for _, v := range ask(t, db, "SELECT view_name FROM duckdb_views() WHERE NOT internal AND view_name NOT LIKE '%by_sequence' AND view_name != 'sequence_tags'") {
		if !strings.Contains(string(doc), "`"+v[0].(string)) && !strings.Contains(string(doc), "FROM "+v[0].(string)) {
			t.Errorf("docs/metrics.md does not name the view %s", v[0])
		}
	}
}

func TestEveryQueryOfTheWalkthroughIsAnswered(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join("..", "..", "docs", "sql.md"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	querytest.Random(t, dir, "r1", 1, 6, 6, querytest.Drafter{Name: "good", Skill: .8, Decay: .9}, querytest.Drafter{Name: "early", Skill: .5, Decay: .9},
		querytest.Drafter{Name: "shift", Skill: .1, Decay: .9})
	querytest.Sequence(t, dir, "r1", "p0002", 31, make([]int32, 60), nil) // the one it reads
	querytest.Rounds(t, dir, "r1", "good", schemas.MethodChain, 5, "p0002", make([]int, 20)...)
	querytest.Write(t, dir, "similarity/r1--bf16.parquet", schemas.Similarity{RunA: "r1", RunB: "bf16", SeqID: "s", State: 2, Cosine: new(float32(1))})
	if n := answers(t, openDB(t, dir), string(doc)); n < 10 {
		t.Errorf("%d queries found, want at least 10", n)
	}
}

// answers asks every query of a document, and counts them.
func answers(t *testing.T, db *DB, doc string) (n int) {
	t.Helper()
	for _, block := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(doc, -1) {
		for sql := range strings.SplitSeq(block[1], ";") {
			if sql = strings.TrimSpace(sql); sql == "" {
				continue
			}
			n++
			if len(ask(t, db, sql)) == 0 && !strings.Contains(sql, "looped") {
				t.Errorf("no rows: %s", sql)
			}
		}
	}
	return n
}
