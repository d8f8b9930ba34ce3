package diagnose

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// WriteText writes a report for people: the sentence, what was found with its
// evidence, what cannot be told and why, and what is ruled out by what.
func WriteText(w io.Writer, r *Report) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n", fold(r.Sentence, "", 100))
	fmt.Fprintf(&b, "Drafter %s on %d sequences; variants drafted at %d anchors; %.1f s\n", r.Drafter, r.Sequences, r.Anchors, r.Seconds)
	for _, f := range r.Findings {
		if f.Verdict == RuledOut || f.Verdict == CannotTell {
			continue
		}
		fmt.Fprintf(&b, "\n%s: %s (%s, %s)\n", strings.ToUpper(string(f.Verdict)), f.Hypothesis, f.Subject, f.Key)
		for _, line := range []struct{ word, text string }{{"so", f.Sentence}, {"measured", f.Measure}, {"control", f.Control}, {"needs", f.Needs}} {
			if line.text != "" {
				fmt.Fprintf(&b, "  %-9s%s\n", line.word, fold(line.text, "           ", 88))
			}
		}
	}
	list(&b, r, CannotTell, "Cannot be told from this data", func(f Finding) string { return f.Sentence + " Needs " + f.Needs + "." })
	list(&b, r, RuledOut, "Ruled out", func(f Finding) string { return f.Measure })
	if len(r.Offsets) > 0 {
		fmt.Fprint(&b, "\nHits by slot, against the label and those beside it\n")
		t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
		for i, o := range r.Offsets {
			if i == 0 {
				fmt.Fprint(t, "  offset\t")
				for k := range o.Accuracy {
					fmt.Fprintf(t, "slot %d\t", k+1)
				}
				fmt.Fprint(t, "all\t\n")
			}
			fmt.Fprintf(t, "  %+d\t", o.Shift)
			for _, a := range o.Accuracy {
				fmt.Fprintf(t, "%.3f\t", a)
			}
			fmt.Fprintf(t, "%.3f\t\n", o.Pooled.Value)
		}
		t.Flush()
	}
	if len(r.Numbers) > 0 {
		fmt.Fprint(&b, "\nThe same drafts by every definition\n")
		t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
		for _, n := range r.Numbers {
			fmt.Fprintf(t, "  %s\t%.3f\t%.3f–%.3f\t%s\n", n.Name, n.Is.Value, n.Is.Low, n.Is.High, n.Words)
		}
		t.Flush()
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// list writes the findings of a verdict, each with why; what one measurement
// settles stands together.
func list(b *strings.Builder, r *Report, v Verdict, title string, why func(Finding) string) {
	last := ""
	for _, f := range r.Findings {
		if f.Verdict != v {
			continue
		}
		words := "\n      " + fold(why(f), "      ", 94)
		switch {
		case last == "":
			fmt.Fprintf(b, "\n%s", title)
		case words != last:
			b.WriteString(last)
		}
		fmt.Fprintf(b, "\n  %s", f.Hypothesis)
		last = words
	}
	if last != "" {
		b.WriteString(last + "\n")
	}
}

// fold breaks a text into lines of at most width characters.
func fold(text, indent string, width int) string {
	var b strings.Builder
	at := 0
	for i, word := range strings.Fields(text) {
		n := len([]rune(word))
		switch {
		case i == 0:
		case at+1+n > width:
			b.WriteString("\n" + indent)
			at = 0
		default:
			b.WriteByte(' ')
			at++
		}
		b.WriteString(word)
		at += n
	}
	return b.String()
}
