package report

import (
	"bufio"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/data/query"
)

// pageSource is the page: its style, and templates over [page].
//
//go:embed page.html
var pageSource string

// page is what the template sees.
type page struct {
	Dataset string
	LeftOut []string
	Method  string
	Runs    []pageRun
	Heat    []section
	More    []string // what there is no room for
	Live    bool     // it goes on by itself; see [WriteLive]
}

// What a page has room for. The tables of the text and of the JSON have all.
const (
	pageRuns     = 12
	pageDrafters = 10
)

type pageRun struct {
	Name, Verdict string
	Facts         []string
	Legend        []facet
	Cards         []card
	Sections      []section
	Readings      []pageReading
}

// card is a drafter's headline.
type card struct {
	facet
	Big, Unit, Span string
	Small           []string
}

// section is a plot beside its table, or a table alone.
type section struct {
	Title, Note string
	Legend      []facet
	Chart       *chart
	Facets      []facet
	Table       *pageTable
	More        *pageTable // folded away
}

type pageTable struct {
	Title string
	Head  []pageCell
	Rows  [][]pageCell
}

// pageCell is a cell; Span is the interval behind its number.
type pageCell struct {
	S, Span string
	Class   string
}

func (t table) page() *pageTable {
	if len(t.rows) == 0 {
		return nil
	}
	cells := func(row []string) []pageCell {
		out := make([]pageCell, len(row))
		for i, s := range row {
			s, span, ok := strings.Cut(s, " [")
			out[i] = pageCell{S: s, Class: pick(i < t.left || i == len(row)-1 && t.head[i] == "", "word", "number")}
			if ok {
				out[i].Span = strings.ReplaceAll(strings.TrimSuffix(span, "]"), ", ", "–")
			}
		}
		return out
	}
	p := &pageTable{Title: t.title, Head: cells(t.head)}
	spans := make([]bool, len(t.head))
	for _, row := range t.rows {
		p.Rows = append(p.Rows, cells(row))
		for i, c := range p.Rows[len(p.Rows)-1] {
			spans[i] = spans[i] || c.Span != ""
		}
	}
	for _, row := range p.Rows { // a missing interval keeps its place
		for i := range row {
			if spans[i] && row[i].Span == "" && row[i].S != "" {
				row[i].Span = none
			}
		}
	}
	return p
}

// WriteHTML writes the report as one page that needs nothing else: no script,
// no font, no picture from anywhere. Its size is bounded: the first runs, the
// best drafters of each, and a few texts.
func WriteHTML(w io.Writer, r *Report) error { return r.write(w, "page") }

// WriteMain writes what is within the page alone, for a page of [WriteLive].
func WriteMain(w io.Writer, r *Report) error { return r.write(w, "main") }

// WriteLive writes a page that shows a dataset as it grows: it asks for the
// server-sent events at live/events beside it, takes the data of an event named
// "report" (of [WriteMain]) for the report, and that of "now" for a line of
// text about the moment.
func WriteLive(w io.Writer, dataset string) error {
	return execute(w, "page", page{Dataset: dataset, Live: true})
}

func (r *Report) write(w io.Writer, name string) error { return execute(w, name, r.page()) }

func execute(w io.Writer, name string, p page) error {
	tmpl, err := template.New("page").Parse(pageSource)
	if err != nil {
		return fmt.Errorf("parsing the page: %w", err)
	}
	b := bufio.NewWriter(w)
	if err := tmpl.ExecuteTemplate(b, name, p); err != nil {
		return fmt.Errorf("writing the page: %w", err)
	}
	return b.Flush()
}

func (r *Report) page() page {
	p := page{Dataset: r.Dataset, Method: r.method(), LeftOut: query.Lines(r.LeftOut)}
	for i, run := range r.Runs {
		if i == pageRuns {
			p.More = append(p.More, quantity(int64(len(r.Runs)-i), "more run")+" are not shown here: draftscope report --run NAME --html FILE")
			break
		}
		p.Runs = append(p.Runs, run.page())
	}
	for i, pair := range r.Similarities {
		if i == heatPairs {
			p.More = append(p.More, quantity(int64(len(r.Similarities)-i), "more pair")+" of captures were compared: ask for similarity_map() with draftscope query")
			break
		}
		t := pair.table()
		p.Heat = append(p.Heat, section{Title: t.title, Note: t.note, Legend: heatKey(), Chart: pair.heat(), Table: t.page()})
	}
	return p
}

func (run Run) page() pageRun {
	out := pageRun{Name: run.Run, Verdict: run.Verdict, Facts: run.facts()}
	leaders := run.leaderTable()
	if n := len(run.Drafters); n > pageDrafters {
		run = run.best(pageDrafters)
		out.Facts = append(out.Facts, fmt.Sprintf("the plots show the best %d of %d drafters; the leader board has all", pageDrafters, n))
	}
	for i, d := range run.Drafters {
		out.Legend = append(out.Legend, facet{Name: d.Drafter, Class: seriesClass(i), Mark: mark(i, 0, 0)})
	}
	for _, i := range ranking(run.Drafters) {
		out.Cards = append(out.Cards, run.Drafters[i].card(out.Legend[i]))
	}
	add := func(s section, t, more table) {
		s.Table, s.More = t.page(), more.page()
		if s.Title == "" {
			s.Title = t.title
		}
		if s.Note == "" {
			s.Note = t.note
		}
		if s.Table != nil || s.Chart != nil || len(s.Facets) > 0 {
			out.Sections = append(out.Sections, s)
		}
	}
	none := table{}
	add(section{}, leaders, none)
	add(section{Chart: run.slotChart("slot_accuracy", func(s Slot) Estimate { return s.Accuracy }), Legend: out.Legend}, run.slotTable(), none)
	add(section{Title: "Tokens a round by budget", Chart: run.budgetChart(), Legend: out.Legend}, run.sweepTable(), run.acceptanceTable())
	add(section{Chart: run.costChart(), Legend: out.Legend}, run.costTable(), none)
	if c := run.timeChart(); c != nil {
		t := run.timeTable()
		add(section{Title: t.title, Note: t.note, Chart: c, Legend: out.Legend}, none, t)
	}
	add(section{Chart: run.tagChart(), Legend: out.Legend}, run.tagTable(), none)
	add(section{Facets: run.distributionFacets()}, none, run.distributionTable())
	if n := len(out.Sections); n > 0 && len(out.Sections[n-1].Facets) > 0 && out.Sections[n-1].Title == "" {
		d := run.distributionTable()
		out.Sections[n-1].Title, out.Sections[n-1].Note = d.title, d.note
	}
	add(section{
		Title: "Drafter against drafter", Chart: run.forest(),
		Note: "accept_len_macro over shared sequences, paired bootstrap; a bar has the colour of the drafter that leads beyond the interval, grey means undecided; W/T/L counts the sequences that A wins, ties and loses",
	}, run.pairCompactTable(), none)
	add(section{Facets: run.slotDifferences()}, run.slotLeadTable(), run.slotPairTable())
	add(section{Chart: run.slotChart("prefix_rate", func(s Slot) Estimate { return s.PrefixRate }), Legend: out.Legend}, run.prefixTable(), none)
	for _, t := range []table{run.effectTable(), run.storedTable(), run.summaryTable(), run.lossMeanTable(), run.lossTable(), run.faultTable()} {
		add(section{}, t, none)
	}
	for _, r := range run.Readings {
		out.Readings = append(out.Readings, r.page())
	}
	return out
}

// best is the run with its n best drafters, in the order of their names, and
// what is said of them.
func (run Run) best(n int) Run {
	keep := map[string]bool{}
	for _, i := range ranking(run.Drafters)[:n] {
		keep[run.Drafters[i].Drafter] = true
	}
	run.Drafters = slices.DeleteFunc(slices.Clone(run.Drafters), func(d Drafter) bool { return !keep[d.Drafter] })
	run.Pairs = slices.DeleteFunc(slices.Clone(run.Pairs), func(p Pair) bool { return !keep[p.A] || !keep[p.B] })
	return run
}

// card shows tokens a round where there are rounds, else accuracy at slot 1.
func (d Drafter) card(key facet) card {
	c := card{facet: key, Big: none, Unit: "tokens a round"}
	for _, a := range d.Acceptance {
		if a.AcceptLenMacro.Value != nil {
			c.Big, c.Unit, c.Span = fixed(a.AcceptLenMacro.Value, 2), "tokens a round, "+a.name(), interval(a.AcceptLenMacro, 2, false)
			break
		}
	}
	if d.Note != "" {
		c.Small = append(c.Small, d.Note)
	}
	if len(d.Slots) > 0 {
		c.Small = append(c.Small, "slot 1 hit rate "+fixed(d.Slots[0].Accuracy.Value, 3))
	}
	if n := len(d.Acceptance); n > 1 {
		a := d.Acceptance[n-1]
		c.Small = append(c.Small, fmt.Sprintf("%s: %s", a.name(), fixed(a.AcceptLenMacro.Value, 2)))
	}
	return c
}
