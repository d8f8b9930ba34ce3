package report

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode/utf8"

	"golang.org/x/term"

	"github.com/draftscope/draftscope/data/query"
)

// WriteText writes the report for people at a terminal. Headings are bold
// when w is one.
func WriteText(w io.Writer, r *Report) error {
	f, ok := w.(*os.File)
	return writeText(w, r, ok && term.IsTerminal(int(f.Fd())))
}

func writeText(w io.Writer, r *Report, bold bool) error {
	b := new(strings.Builder)
	heading := func(s string) {
		if bold {
			s = "\x1b[1m" + s + "\x1b[0m"
		}
		fmt.Fprintln(b, s)
	}
	heading("Dataset " + r.Dataset)
	for _, line := range query.Lines(r.LeftOut) {
		fmt.Fprintf(b, "left out: %s\n", line)
	}
	if len(r.Runs) == 0 {
		fmt.Fprintln(b, "It holds no run.")
	}
	for _, run := range r.Runs {
		fmt.Fprintln(b)
		heading("Run " + run.Run)
		for _, line := range run.facts() {
			fmt.Fprintln(b, line)
		}
		fmt.Fprintln(b)
		for _, line := range wrap(run.Verdict) {
			heading(line)
		}
		for _, t := range run.tables() {
			fmt.Fprintln(b)
			heading(t.title)
			for _, line := range wrap(t.note) {
				fmt.Fprintln(b, "  "+line)
			}
			t.write(b)
		}
	}
	fmt.Fprintln(b)
	for _, line := range wrap(r.method()) {
		fmt.Fprintln(b, line)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// write aligns the columns by the runes of their cells.
func (t table) write(w *strings.Builder) {
	width := make([]int, len(t.head))
	for _, row := range append([][]string{t.head}, t.rows...) {
		for i, cell := range row {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range append([][]string{t.head}, t.rows...) {
		var b strings.Builder
		for i, cell := range row {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell))
			if i < t.left || i == len(row)-1 && t.head[i] == "" {
				cell += pad
			} else {
				cell = pad + cell
			}
			b.WriteString("  " + cell)
		}
		fmt.Fprintln(w, strings.TrimRight(b.String(), " "))
	}
}

// wrap breaks a sentence into lines of at most 100 runes.
func wrap(s string) []string {
	const width = 100
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(s) {
		if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}

// WriteJSON writes the report as one JSON object.
func WriteJSON(w io.Writer, r *Report) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(r)
}
