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
	n := 0
	for _, block := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(string(doc), -1) {
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
	if n < 15 {
		t.Errorf("%d queries found, want at least 15", n)
	}
	for _, v := range ask(t, db, "SELECT view_name FROM duckdb_views() WHERE NOT internal AND view_name NOT LIKE '%by_sequence' AND view_name != 'sequence_tags'") {
		if !strings.Contains(string(doc), "`"+v[0].(string)) && !strings.Contains(string(doc), "FROM "+v[0].(string)) {
			t.Errorf("docs/metrics.md does not name the view %s", v[0])
		}
	}
}
