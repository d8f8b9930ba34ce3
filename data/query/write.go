package query

import (
	"bufio"
	"encoding/csv"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// A Format is a way to write an answer.
type Format string

// The formats of [Write].
const (
	Table Format = "table" // aligned columns and a count, for people
	CSV   Format = "csv"   // RFC 4180 with a header; NULL is an empty field
	JSON  Format = "json"  // an array of objects
)

// ParseFormat reads a format's name.
func ParseFormat(s string) (Format, error) {
	for _, f := range []Format{Table, CSV, JSON} {
		if string(f) == s {
			return f, nil
		}
	}
	return "", fmt.Errorf("format is %q, want table, csv or json", s)
}

// Write writes every row that is left in rows, and closes it. A table is held
// in memory until its last row is known; the other formats stream.
func Write(w io.Writer, rows *Rows, f Format) (err error) {
	defer func() {
		if cerr := rows.Close(); err == nil {
			err = cerr
		}
	}()
	b := bufio.NewWriter(w)
	switch f {
	case Table:
		err = writeTable(b, rows)
	case CSV:
		err = writeCSV(b, rows)
	case JSON:
		err = writeJSON(b, rows)
	default:
		_, err = ParseFormat(string(f))
	}
	if err != nil {
		return err
	}
	return b.Flush()
}

func writeTable(w *bufio.Writer, rows *Rows) error {
	cells := [][]string{make([]string, len(rows.Columns))}
	width := make([]int, len(rows.Columns))
	right := make([]bool, len(rows.Columns))
	for i, c := range rows.Columns {
		cells[0][i] = c.Name
		width[i] = utf8.RuneCountInString(c.Name)
		right[i] = isNumber(c.Type)
	}
	for rows.Next() {
		line := make([]string, len(width))
		for i, v := range rows.Values() {
			line[i] = "NULL"
			if v != nil {
				line[i] = visible(text(v, rows.Columns[i].Type))
			}
			width[i] = max(width[i], utf8.RuneCountInString(line[i]))
		}
		cells = append(cells, line)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	rule := make([]string, len(width))
	for i := range rule {
		rule[i] = strings.Repeat("─", width[i])
	}
	for _, line := range slices.Insert(cells, 1, rule) {
		var b strings.Builder
		for i, cell := range line {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell))
			if i > 0 {
				b.WriteString("  ")
			}
			if right[i] {
				b.WriteString(pad + cell)
			} else {
				b.WriteString(cell + pad)
			}
		}
		if _, err := fmt.Fprintln(w, strings.TrimRight(b.String(), " ")); err != nil {
			return err
		}
	}
	unit := "rows"
	if len(cells) == 2 {
		unit = "row"
	}
	_, err := fmt.Fprintf(w, "(%d %s)\n", len(cells)-1, unit)
	return err
}

func isNumber(sqlType string) bool {
	switch sqlType {
	case "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "UHUGEINT", "FLOAT", "DOUBLE":
		return true
	}
	return strings.HasPrefix(sqlType, "DECIMAL")
}

// visible keeps a cell on its line, except where the cell is a drawing of
// DuckDB's own (EXPLAIN).
func visible(s string) string {
	if strings.Contains(s, "┌") {
		return s
	}
	return strings.NewReplacer("\n", `\n`, "\r", `\r`, "\t", `\t`, "\x1b", `\x1b`).Replace(s)
}

func writeCSV(w *bufio.Writer, rows *Rows) error {
	c := csv.NewWriter(w)
	line := make([]string, len(rows.Columns))
	for i, col := range rows.Columns {
		line[i] = col.Name
	}
	if err := c.Write(line); err != nil {
		return err
	}
	for rows.Next() {
		for i, v := range rows.Values() {
			line[i] = ""
			if v != nil {
				line[i] = text(v, rows.Columns[i].Type)
			}
		}
		if err := c.Write(line); err != nil {
			return err
		}
	}
	c.Flush()
	if err := rows.Err(); err != nil {
		return err
	}
	return c.Error()
}

func writeJSON(w *bufio.Writer, rows *Rows) error {
	keys := make([][]byte, len(rows.Columns))
	seen := make(map[string]int)
	for i, c := range rows.Columns {
		name := c.Name
		for n := seen[c.Name]; ; n++ { // SQL allows two columns of one name, an object does not
			if n > 0 {
				name = c.Name + "_" + strconv.Itoa(n)
			}
			if _, taken := seen[name]; !taken {
				break
			}
		}
		seen[name]++
		keys[i] = jsonString(name)
	}
	line := []byte("[")
	sep := "\n"
	for rows.Next() {
		line = append(append(line, sep...), '{')
		sep = ",\n"
		for i, v := range rows.Values() {
			if i > 0 {
				line = append(line, ", "...)
			}
			line = append(append(line, keys[i]...), ": "...)
			line = appendJSON(line, v, rows.Columns[i].Type)
		}
		line = append(line, '}')
		if _, err := w.Write(line); err != nil {
			return err
		}
		line = line[:0]
	}
	if err := rows.Err(); err != nil {
		return err
	}
	if sep != "\n" {
		line = append(line, '\n')
	}
	_, err := w.Write(append(line, "]\n"...))
	return err
}

// appendJSON appends a value. JSON has no NaN and no infinity: they become
// the strings "NaN", "Infinity" and "-Infinity", which nobody takes for NULL.
func appendJSON(b []byte, v any, sqlType string) []byte {
	switch v := v.(type) {
	case nil:
		return append(b, "null"...)
	case bool, int64, *big.Int, Decimal:
		return append(b, text(v, sqlType)...)
	case float32, float64:
		s := text(v, sqlType)
		switch s {
		case "NaN", "Infinity", "-Infinity":
			return append(b, jsonString(s)...)
		}
		return append(b, s...)
	case []any:
		b = append(b, '[')
		for i, e := range v {
			if i > 0 {
				b = append(b, ", "...)
			}
			b = appendJSON(b, e, "")
		}
		return append(b, ']')
	case Map:
		b = append(b, '{')
		for i, e := range v {
			if i > 0 {
				b = append(b, ", "...)
			}
			b = append(append(b, jsonString(text(e.Key, ""))...), ": "...)
			b = appendJSON(b, e.Value, "")
		}
		return append(b, '}')
	}
	return append(b, jsonString(text(v, sqlType))...)
}

func jsonString(s string) []byte {
	b, err := json.Marshal(strings.ToValidUTF8(s, "\uFFFD"))
	if err != nil {
		return []byte(`""`) // a valid string always marshals
	}
	return b
}

// text spells one value as a person reads it; lists and maps are JSON.
func text(v any, sqlType string) string {
	switch v := v.(type) {
	case nil:
		return "NULL"
	case string:
		return v
	case Decimal:
		return string(v)
	case float32:
		return float(float64(v), 32)
	case float64:
		return float(v, 64)
	case []byte:
		return `\x` + hex.EncodeToString(v)
	case time.Time:
		switch {
		case sqlType == "DATE":
			return v.UTC().Format(time.DateOnly)
		case strings.HasPrefix(sqlType, "TIME") && !strings.HasPrefix(sqlType, "TIMESTAMP"):
			return v.Format("15:04:05.999999")
		}
		return v.UTC().Format(time.RFC3339Nano)
	case []any, Map:
		return string(appendJSON(nil, v, sqlType))
	}
	return fmt.Sprint(v) // bool, int64, *big.Int
}

func float(v float64, bits int) string {
	switch {
	case math.IsInf(v, 1):
		return "Infinity"
	case math.IsInf(v, -1):
		return "-Infinity"
	case v != 0 && (math.Abs(v) < 1e-6 || math.Abs(v) >= 1e21):
		return strconv.FormatFloat(v, 'e', -1, bits)
	}
	return strconv.FormatFloat(v, 'f', -1, bits) // NaN as "NaN"
}
