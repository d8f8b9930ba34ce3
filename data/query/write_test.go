//go:build cgo

package query

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/draftscope/draftscope/data/query/querytest"
)

const everyType = `SELECT * FROM (VALUES
	(1, 1.50::DECIMAL(5,2), 'a"b,c', [1.5, NULL, 'NaN'::DOUBLE], MAP {'z': 1, 'a': NULL}, {'x': true}, 'NaN'::DOUBLE, 0.1::FLOAT,
	 DATE '2026-01-02', TIMESTAMPTZ '2026-01-02 03:04:05.5+00', 170141183460469231731687303715884105727::HUGEINT, 'x'::BLOB, sum_of_nothing()),
	(NULL, NULL, NULL, NULL, NULL, NULL, 'inf'::DOUBLE, NULL, NULL, NULL, NULL, NULL, NULL)
) v(i, d, s, l, m, st, f, f4, date, at_, big, b, n)`

func write(t *testing.T, db *DB, f Format, sql string) string {
	t.Helper()
	rows, err := db.Query(t.Context(), strings.ReplaceAll(sql, "sum_of_nothing()", "(SELECT sum(slot) FROM slots WHERE false)"))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := Write(&b, rows, f); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestAnswersAreWritten(t *testing.T) {
	dir := t.TempDir()
	querytest.Slots(t, dir, "r", "d", "s", []int{1, 0})
	db := openDB(t, dir)
	for _, c := range []struct {
		name string
		f    Format
		sql  string
		want string
	}{
		{"a table", Table, "SELECT run, slot, accuracy, NULL::VARCHAR AS n, 'a\nb' AS s FROM slot_accuracy ORDER BY slot", "" +
			"run  slot  accuracy  n     s\n" +
			"───  ────  ────────  ────  ────\n" +
			"r       1         1  NULL  a\\nb\n" +
			"r       2         0  NULL  a\\nb\n" +
			"(2 rows)\n"},
		{"a table of one row", Table, "SELECT 1 AS a", "a\n─\n1\n(1 row)\n"},
		{"a table of no rows", Table, "SELECT 1 AS a WHERE false", "a\n─\n(0 rows)\n"},
		{"JSON of no rows", JSON, "SELECT 1 AS a WHERE false", "[]\n"},
		{"JSON of two columns of one name", JSON, "SELECT 1 AS a, 2 AS a, 3 AS a_1", "[\n{\"a\": 1, \"a_1\": 2, \"a_1_1\": 3}\n]\n"},
		{"JSON of every type", JSON, everyType, `[
{"i": 1, "d": 1.5, "s": "a\"b,c", "l": [1.5, null, "NaN"], "m": {"z": 1, "a": null}, "st": {"x": true}, "f": "NaN", "f4": 0.1, "date": "2026-01-02", "at_": "2026-01-02T03:04:05.5Z", "big": 170141183460469231731687303715884105727, "b": "\\x78", "n": null},
{"i": null, "d": null, "s": null, "l": null, "m": null, "st": null, "f": "Infinity", "f4": null, "date": null, "at_": null, "big": null, "b": null, "n": null}
]
`},
		{"CSV of every type", CSV, everyType, `i,d,s,l,m,st,f,f4,date,at_,big,b,n
1,1.5,"a""b,c","[1.5, null, ""NaN""]","{""z"": 1, ""a"": null}","{""x"": true}",NaN,0.1,2026-01-02,2026-01-02T03:04:05.5Z,170141183460469231731687303715884105727,\x78,
,,,,,,Infinity,,,,,,
`},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := write(t, db, c.f, c.sql)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
			switch c.f {
			case JSON:
				if !json.Valid([]byte(got)) {
					t.Errorf("no valid JSON: %s", got)
				}
			case CSV:
				if _, err := csv.NewReader(strings.NewReader(got)).ReadAll(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func TestAnUnknownFormatIsNamed(t *testing.T) {
	if _, err := ParseFormat("yaml"); err == nil || !strings.Contains(err.Error(), "yaml") {
		t.Errorf("error is %v", err)
	}
	if f, err := ParseFormat("csv"); f != CSV || err != nil {
		t.Errorf("csv is %v, %v", f, err)
	}
}

type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, errPipe }

var errPipe = errors.New("broken pipe")

func TestAFailingWriterIsReported(t *testing.T) {
	dir := t.TempDir()
	querytest.Slots(t, dir, "r", "d", "s", []int{1, 0})
	db := openDB(t, dir)
	for _, f := range []Format{Table, CSV, JSON} {
		rows, err := db.Query(t.Context(), "SELECT range, repeat('x', 100) FROM range(10000)")
		if err != nil {
			t.Fatal(err)
		}
		if err := Write(brokenPipe{}, rows, f); !errors.Is(err, errPipe) {
			t.Errorf("%s: error is %v", f, err)
		}
	}
}
