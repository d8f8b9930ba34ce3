package report

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/draftscope/draftscope/data/query"
)

// Versus compares two drafters over one capture in depth: by slot and setting,
// by part of the text, sequence by sequence, and by what each fails on.
// Differences are A's value minus B's.
type Versus struct {
	Run  string `json:"run"`
	Pair Pair   `json:"pair"`
	// Parts are differences in tokens a round by tag, by length (accept_len_macro
	// over sequences) and by distance from the prompt (accept_len_micro).
	Parts []PartDifference `json:"parts"`
	// Slot1 counts the anchors that both drafted at, by whose first slot hit.
	Slot1 Agreement `json:"slot_1"`
	// Sequences are those with the largest differences both ways.
	Sequences []SequenceDifference `json:"sequences"`
	// FailsA are labels at which only B's first slot hits, the most frequent
	// first; FailsB the other way.
	FailsA []Failure `json:"fails_a"`
	FailsB []Failure `json:"fails_b"`
}

// PartDifference is a difference within a part of the text.
type PartDifference struct {
	By    string `json:"by"` // a tag, "length" or "distance"
	Value string `json:"value"`
	Difference
}

// Agreement is a 2 x 2 table of hits.
type Agreement struct {
	Both    int64 `json:"both"`
	OnlyA   int64 `json:"only_a"`
	OnlyB   int64 `json:"only_b"`
	Neither int64 `json:"neither"`
}

// SequenceDifference is one sequence's tokens a round by both.
type SequenceDifference struct {
	SeqID      string  `json:"seq_id"`
	A          float64 `json:"a"`
	B          float64 `json:"b"`
	Difference float64 `json:"difference"`
}

// Failure is a label that one drafter misses where the other hits.
type Failure struct {
	TokenID int64  `json:"token_id"`
	Text    string `json:"text,omitempty"`
	Count   int64  `json:"count"` // anchors
	Of      int64  `json:"of"`    // anchors with this label
}

const (
	mostSequences = 5 // each way
	mostFailures  = 10
)

// ErrNoDrafter marks a drafter that has no rows in a run.
var ErrNoDrafter = errors.New("no such drafter")

// CompareDrafters compares drafters a and b over a run. It is [ErrNoDrafter] when one
// of them has nothing stored there.
func CompareDrafters(ctx context.Context, db *query.DB, run, a, b string, opt Options) (*Versus, error) {
	if err := opt.Validate(); err != nil {
		return nil, fmt.Errorf("comparing drafters: %w", err)
	}
	if opt.Resamples == 0 {
		opt.Resamples = 2000
	}
	l := &loader{ctx: ctx, db: db}
	all := l.drafters(run)
	sides := [2]*sums{}
	for i, name := range []string{a, b} {
		at := slices.IndexFunc(all, func(s *sums) bool { return s.drafter == name })
		switch {
		case l.err != nil:
			return nil, fmt.Errorf("comparing %s with %s: %w", a, b, l.err)
		case at < 0:
			var have []string
			for _, s := range all {
				have = append(have, s.drafter)
			}
			return nil, fmt.Errorf("%w: %s; run %s has %q", ErrNoDrafter, name, run, have)
		}
		sides[i] = all[at]
	}
	v := &Versus{Run: run, Parts: []PartDifference{}, Sequences: []SequenceDifference{}, FailsA: []Failure{}, FailsB: []Failure{}}
	var err error
	if v.Pair, err = compare(ctx, sides[0], sides[1], opt); err != nil {
		return nil, fmt.Errorf("comparing %s with %s: %w", a, b, err)
	}
	both := bothSides{l: l, run: run, a: sides[0], b: sides[1], opt: opt}
	both.parts(v)
	both.sequences(v)
	both.failures(v)
	if l.err != nil {
		return nil, fmt.Errorf("comparing %s with %s: %w", a, b, l.err)
	}
	return v, nil
}

// bothSides is what the parts of a comparison share.
type bothSides struct {
	l    *loader
	run  string
	a, b *sums
	opt  Options
}

// parts compares tokens a round within parts of the text.
func (s bothSides) parts(v *Versus) {
	tags, _ := s.l.groupings(s.run)
	groups := tags
	lengths := map[int64]map[string]bool{}
	s.l.each("SELECT seq_id, (2 ** floor(log2(length)))::BIGINT FROM sequences WHERE length >= 1 AND run = "+query.Literal(s.run), func(r record) {
		if lengths[r.int(1)] == nil {
			lengths[r.int(1)] = map[string]bool{}
		}
		lengths[r.int(1)][r.text(0)] = true
	})
	for _, b := range slices.Sorted(maps.Keys(lengths)) {
		groups = append(groups, grouping{Part{Tag: "length", Value: fmt.Sprintf("%d to %d", b, 2*b-1)}, lengths[b]})
	}
	ka, okA := s.a.firstSetting()
	kb, okB := s.b.firstSetting()
	if !okA || !okB {
		return
	}
	for _, g := range groups {
		x, y := newCounted(len(s.a.seqs)), newCounted(len(s.a.seqs))
		for i, seq := range s.a.seqs {
			if j, ok := s.b.index[seq]; ok && g.among[seq] {
				x.num[i], x.den[i] = s.a.accept[ka].macro.num[i], s.a.accept[ka].macro.den[i]
				y.num[i], y.den[i] = s.b.accept[kb].macro.num[j], s.b.accept[kb].macro.den[j]
			}
		}
		s.part(v, g.name.Tag, g.name.Value, "accept_len_macro", ka, x, y)
	}
	distances := map[int64]*[2]counted{}
	s.l.each(`SELECT drafter, seq_id, (2 ** floor(log2(anchor + 2 - prompt_len)))::BIGINT AS bucket, sum(accept_len)::BIGINT, count(*)
		FROM rounds JOIN (SELECT run, seq_id, prompt_len FROM sequences) USING (run, seq_id)
		WHERE NOT truncated AND method = 'chain' AND anchor + 2 > prompt_len AND run = `+query.Literal(s.run)+" AND drafter IN ("+
		query.Literal(s.a.drafter)+", "+query.Literal(s.b.drafter)+") GROUP BY ALL", func(r record) {
		d := distances[r.int(2)]
		if d == nil {
			d = &[2]counted{newCounted(len(s.a.seqs)), newCounted(len(s.a.seqs))}
			distances[r.int(2)] = d
		}
		if i, ok := s.a.index[r.text(1)]; ok {
			side := b2i(r.text(0) == s.b.drafter)
			d[side].num[i], d[side].den[i] = r.float(3), r.float(4)
		}
	})
	for _, b := range slices.Sorted(maps.Keys(distances)) {
		s.part(v, "distance", fmt.Sprintf("%d to %d", b, 2*b-1), "accept_len_micro", ka, distances[b][0], distances[b][1])
	}
}

// part estimates one paired difference over the sequences that both can count.
func (s bothSides) part(v *Versus, by, value, metric string, key setting, x, y counted) {
	if s.l.err != nil {
		return
	}
	d, err := Paired(s.l.ctx, x.num, x.den, y.num, y.den, s.opt)
	if s.l.err = err; err != nil || d.A == nil {
		return
	}
	d.Metric, d.Method, d.Budget = metric, key.method, key.budget
	v.Parts = append(v.Parts, PartDifference{By: by, Value: value, Difference: d})
}

// score counts a sequence for the side that has more.
func (d *Difference) score(a, b float64) {
	switch {
	case a > b:
		d.Wins++
	case a < b:
		d.Losses++
	default:
		d.Ties++
	}
}

// sequences picks those with the largest differences.
func (s bothSides) sequences(v *Versus) {
	ka, okA := s.a.firstSetting()
	kb, okB := s.b.firstSetting()
	if !okA || !okB {
		return
	}
	var all []SequenceDifference
	for i, seq := range s.a.seqs {
		j, ok := s.b.index[seq]
		if x, y := s.a.accept[ka].macro, s.b.accept[kb].macro; ok && x.den[i] > 0 && y.den[j] > 0 {
			all = append(all, SequenceDifference{seq, x.num[i], y.num[j], x.num[i] - y.num[j]})
		}
	}
	slices.SortStableFunc(all, func(x, y SequenceDifference) int { return cmp.Compare(y.Difference, x.Difference) })
	for i, q := range all {
		if i < mostSequences && q.Difference > 0 || len(all)-i <= mostSequences && q.Difference < 0 {
			v.Sequences = append(v.Sequences, q)
		}
	}
}

// failures counts where the first slots of the two differ.
func (s bothSides) failures(v *Versus) {
	side := func(name string) string {
		return "(SELECT seq_id, anchor, label, hit FROM slots WHERE slot = 1 AND hit IS NOT NULL AND run = " + query.Literal(s.run) + " AND drafter = " + query.Literal(name) + ")"
	}
	shared := "FROM " + side(s.a.drafter) + " a JOIN " + side(s.b.drafter) + " b USING (seq_id, anchor)"
	s.l.each("SELECT count(*) FILTER (a.hit AND b.hit), count(*) FILTER (a.hit AND NOT b.hit), count(*) FILTER (b.hit AND NOT a.hit), count(*) FILTER (NOT a.hit AND NOT b.hit) "+shared,
		func(r record) { v.Slot1 = Agreement{r.int(0), r.int(1), r.int(2), r.int(3)} })
	for _, f := range []struct {
		only string
		into *[]Failure
	}{{"b.hit AND NOT a.hit", &v.FailsA}, {"a.hit AND NOT b.hit", &v.FailsB}} {
		s.l.each("SELECT a.label, count(*) FILTER ("+f.only+") AS n, count(*) "+shared+" GROUP BY a.label HAVING n > 0 ORDER BY n DESC, a.label LIMIT "+strconv.Itoa(mostFailures),
			func(r record) {
				x := Failure{TokenID: r.int(0), Count: r.int(1), Of: r.int(2)}
				if s.opt.Decode != nil {
					x.Text = clip(legible(s.opt.Decode(s.run, int32(x.TokenID))), readRunes)
				}
				*f.into = append(*f.into, x)
			})
	}
}

// WriteVersus writes a comparison for people.
func WriteVersus(w io.Writer, v *Versus) error {
	b := new(strings.Builder)
	run := Run{Run: v.Run, Pairs: []Pair{v.Pair}}
	fmt.Fprintf(b, "Run %s, %s − %s, over %s\n", v.Run, v.Pair.A, v.Pair.B, quantity(int64(v.Pair.Sequences), "shared sequence"))
	for _, t := range []table{run.pairTable(), run.slotPairTable(), v.partTable(), v.sequenceTable(), v.slot1Table(), v.failureTable()} {
		if len(t.rows) > 0 {
			fmt.Fprintf(b, "\n%s\n", t.title)
			for _, line := range wrap(t.note) {
				fmt.Fprintln(b, "  "+line)
			}
			t.write(b)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (v *Versus) partTable() table {
	t := table{
		title: "By part of the text",
		note:  "tokens a round within sequences of a tag or length (macro), and of rounds by their distance from the prompt in tokens (micro), paired bootstrap over sequences",
		head:  append([]string{"by", "value"}, pairHead[3:]...), left: 2,
	}
	for _, d := range v.Parts {
		t.rows = append(t.rows, append([]string{d.By, d.Value}, pairRow(v.Pair, d.Difference, "")[3:]...))
	}
	return t
}

func (v *Versus) sequenceTable() table {
	t := table{title: "Sequences apart the most", note: "tokens a round", head: []string{"sequence", "A", "B", "A − B"}, left: 1}
	for _, q := range v.Sequences {
		t.rows = append(t.rows, []string{q.SeqID, fixed(&q.A, 3), fixed(&q.B, 3), signed(&q.Difference, 3)})
	}
	return t
}

func (v *Versus) slot1Table() table {
	return table{
		title: "Slot 1 at the same anchors", note: "of the anchors at which both drafted and slot 1 is scored",
		head: []string{"both hit", "only " + v.Pair.A, "only " + v.Pair.B, "neither"},
		rows: [][]string{{count(v.Slot1.Both), count(v.Slot1.OnlyA), count(v.Slot1.OnlyB), count(v.Slot1.Neither)}},
	}
}

func (v *Versus) failureTable() table {
	t := table{title: "What one fails on", note: "labels that slot 1 of one misses and that of the other hits", head: []string{"drafter", "token", "text", "misses", "of"}, left: 3}
	for _, side := range []struct {
		name string
		list []Failure
	}{{v.Pair.A, v.FailsA}, {v.Pair.B, v.FailsB}} {
		for _, f := range side.list {
			t.rows = append(t.rows, []string{side.name, strconv.FormatInt(f.TokenID, 10), strconv.Quote(f.Text), count(f.Count), count(f.Of)})
		}
	}
	return t
}

// Paired estimates the difference of two ratios over the same sequences, each
// a sum of num over a sum of den; sequences that one side cannot count are
// left out.
func Paired(ctx context.Context, aNum, aDen, bNum, bDen []float64, opt Options) (d Difference, err error) {
	if opt.Resamples == 0 {
		opt.Resamples = 2000
	}
	var at []int
	for i := range aDen {
		if aDen[i] > 0 && bDen[i] > 0 {
			at = append(at, i)
			d.score(aNum[i]/aDen[i], bNum[i]/bDen[i])
		}
	}
	if len(at) == 0 {
		return d, nil
	}
	x, y := counted{aNum, aDen}.pick(at), counted{bNum, bDen}.pick(at)
	var a, b Estimate
	err = bootstrap(ctx, len(at), opt, []question{
		{stat: minus(x.stat(), y.stat()), support: len(at), answer: &d.Difference, paired: true},
		{stat: x.stat(), answer: &a},
		{stat: y.stat(), answer: &b},
	})
	d.A, d.B = a.Value, b.Value
	return d, err
}
