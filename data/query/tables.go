package query

import (
	"fmt"
	"slices"
	"strings"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/parquet-go/parquet-go"

	"github.com/draftscope/draftscope/schemas"
)

// A table is what Open needs to know of one: its columns and the Hive keys in
// the paths of its files, outermost first.
type table struct {
	name       string
	partitions []string
	columns    []column
}

type column struct {
	name     string
	sqlType  string
	nullable bool
	physical string // as the Parquet file of this version spells the type
}

// tables lists the tables of a dataset in the order of their views.
var tables = []table{
	tableOf[schemas.Sequence](schemas.TableSequences, "run"),
	tableOf[schemas.Token](schemas.TableTokens, "run"),
	tableOf[schemas.State](schemas.TableStates, "run", "shard"),
	tableOf[schemas.Draft](schemas.TableDrafts, "run", "drafter"),
	tableOf[schemas.Slot](schemas.TableSlots, "run", "drafter"),
	tableOf[schemas.Round](schemas.TableRounds, "run", "drafter"),
	tableOf[schemas.Similarity](schemas.TableSimilarity),
	tableOf[schemas.Fault](schemas.TableFaults, "run"),
}

func tableOf[T any](name string, partitions ...string) table {
	t := table{name: name, partitions: partitions}
	file := physicalTypes(parquet.SchemaOf(*new(T)))
	for _, f := range schemas.SchemaOf[T](schemas.Envelope{Table: name}).Fields() {
		t.columns = append(t.columns, column{f.Name, sqlType(f.Type), f.Nullable, file[f.Name]})
	}
	return t
}

// physicalTypes maps each top-level column of a schema to the types of its
// leaves. Files are compared by it: an optional column where a required one
// is expected is no difference, another type is.
func physicalTypes(s *parquet.Schema) map[string]string {
	m := make(map[string]string)
	for _, path := range s.Columns() {
		if leaf, ok := s.Lookup(path...); ok {
			m[path[0]] += leaf.Node.Type().Kind().String() + ";"
		}
	}
	return m
}

func sqlType(t arrow.DataType) string {
	switch t := t.(type) {
	case *arrow.StringType:
		return "VARCHAR"
	case *arrow.BooleanType:
		return "BOOLEAN"
	case *arrow.Int32Type:
		return "INTEGER"
	case *arrow.Int64Type:
		return "BIGINT"
	case *arrow.Float32Type:
		return "FLOAT"
	case *arrow.TimestampType:
		return "TIMESTAMP WITH TIME ZONE"
	case *arrow.ListType:
		return sqlType(t.Elem()) + "[]"
	case *arrow.MapType:
		return "MAP(" + sqlType(t.KeyType()) + ", " + sqlType(t.ItemType()) + ")"
	}
	return "BLOB"
}

// view defines the table's view over its files. The partition columns are
// constants taken from the paths by us, one branch a partition: DuckDB would
// guess numbers and dates from their spelling, and take a key=value folder
// above the dataset for one of them.
func (t table) view(files []file) string {
	branches := make(map[string][]string) // head of the branch → paths
	for _, f := range files {
		head := t.selectList(f)
		branches[head] = append(branches[head], f.path)
	}
	if len(branches) == 0 {
		return fmt.Sprintf("CREATE OR REPLACE VIEW %s AS %s WHERE false", t.name, t.selectList(file{missing: t.names()}))
	}
	heads := make([]string, 0, len(branches))
	for head, paths := range branches {
		heads = append(heads, head+" FROM "+readParquet(paths...))
	}
	slices.Sort(heads)
	return fmt.Sprintf("CREATE OR REPLACE VIEW %s AS %s", t.name, strings.Join(heads, "\nUNION ALL "))
}

// readParquet is the table function over these files and no others: signs that
// would make a pattern of a path are taken as they stand.
func readParquet(paths ...string) string {
	literals := make([]string, len(paths))
	for i, p := range paths {
		literals[i] = Literal(noPattern.Replace(p))
	}
	return fmt.Sprintf("read_parquet([%s], hive_partitioning = false)", strings.Join(literals, ", "))
}

var noPattern = strings.NewReplacer("[", "[[]", "*", "[*]", "?", "[?]")

// selectList names every column, the partitions first. A column that the
// file lacks is NULL.
func (t table) selectList(f file) string {
	var cols []string
	for i, p := range t.partitions {
		value := ""
		if f.path != "" {
			value = f.partitions[i]
		}
		cols = append(cols, fmt.Sprintf("%s::VARCHAR AS %s", Literal(value), p))
	}
	for _, c := range t.columns {
		name := `"` + c.name + `"`
		if slices.Contains(f.missing, c.name) {
			name = fmt.Sprintf("NULL::%s AS %s", c.sqlType, name)
		}
		cols = append(cols, name)
	}
	return "SELECT " + strings.Join(cols, ", ")
}

func (t table) names() []string {
	names := make([]string, len(t.columns))
	for i, c := range t.columns {
		names[i] = c.name
	}
	return names
}
