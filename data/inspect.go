package data

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/draftscope/draftscope/schemas"
)

// Description says in words and numbers what a dataset or a Parquet file
// holds.
type Description struct {
	Path    string
	Format  int              // of the dataset; 0 for a file of another program
	Runs    []RunDescription // of a dataset
	File    *FileDescription // of a single file
	Damaged []DamagedFile    // files of a dataset that were left out
}

// RunDescription says what a dataset holds of a run.
type RunDescription struct {
	Run
	Tables []TableDescription
	// Sequences and Scored count what is stored: captured sequences, and for
	// each drafter those with results.
	Sequences int
	Scored    map[string]int
	Faults    map[string]int // rows of the table faults by check
	// Rounded is nil for states stored without loss.
	Rounded *RoundedStates
	Effects []Effect // of rounding on drafters that have read both
}

// TableDescription sums up the files of one table of a run; Drafter is empty
// for tables of a capture.
type TableDescription struct {
	Table   string
	Drafter string
	Files   int
	Rows    int64
	Bytes   int64
}

// DamagedFile is a file that could not be read, and why.
type DamagedFile struct {
	Path   string
	Reason string
}

// FileDescription says what a Parquet file holds.
type FileDescription struct {
	Bytes     int64
	Rows      int64
	RowGroups int
	CreatedBy string
	Columns   []ColumnDescription
	Footer    map[string]string // key-values, without the Arrow schema
}

// ColumnDescription is one leaf column. Sizes are in bytes, over all row
// groups.
type ColumnDescription struct {
	Name         string
	Type         string
	Optional     bool
	Repeated     bool
	Codec        string
	Encodings    []string
	Compressed   int64
	Uncompressed int64
}

// Describe explains the dataset or the Parquet file at path. Of a dataset,
// what [Take] leaves out is listed, and the rest is described; a single file
// that is damaged is an error wrapping [ErrDamaged]. The content of states is
// compared with its digest when they are described as a single file, or
// replayed.
func Describe(path string) (*Description, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("describing %s: %w", path, err)
	}
	var d *Description
	if info.IsDir() {
		d, err = describeDataset(path)
	} else {
		d, err = describeFile(path)
	}
	if err != nil {
		return nil, fmt.Errorf("describing %s: %w", path, err)
	}
	return d, nil
}

func describeFile(path string) (*Description, error) {
	o, err := openPart(path)
	if err != nil {
		return nil, err
	}
	defer o.Close()
	if err := o.verifyBody(); err != nil {
		return nil, err
	}
	d := &Description{Path: path, File: &FileDescription{}}
	err = guard(func() error {
		d.File = o.describe()
		return nil
	})
	if o.ours() {
		d.Format = schemas.FormatVersion
	}
	return d, err
}

func (o *openedPart) describe() *FileDescription {
	md := o.Metadata()
	f := &FileDescription{Bytes: o.size, Rows: md.NumRows, RowGroups: len(md.RowGroups), CreatedBy: md.CreatedBy, Footer: map[string]string{}}
	for _, kv := range md.KeyValueMetadata {
		if kv.Key != "ARROW:schema" {
			f.Footer[kv.Key] = kv.Value
		}
	}
	for i, path := range o.Schema().Columns() {
		leaf, _ := o.Schema().Lookup(path...)
		c := ColumnDescription{
			Name: strings.Join(path, "."), Type: leaf.Node.Type().String(),
			Optional: leaf.Node.Optional(), Repeated: leaf.MaxRepetitionLevel > 0,
		}
		seen := map[string]bool{}
		for _, rg := range md.RowGroups {
			m := rg.Columns[i].MetaData
			c.Codec = m.Codec.String()
			c.Compressed += m.TotalCompressedSize
			c.Uncompressed += m.TotalUncompressedSize
			for _, e := range m.Encoding {
				seen[e.String()] = true
			}
		}
		c.Encodings = sorted(seen)
		f.Columns = append(f.Columns, c)
	}
	return f
}

func describeDataset(dir string) (*Description, error) {
	ds, err := Open(dir)
	if err != nil {
		return nil, err
	}
	inv, err := Take(context.Background(), dir)
	if err != nil {
		return nil, err
	}
	d := &Description{Path: dir, Format: ds.manifest.Format, Damaged: inv.LeftOut}
	for _, run := range ds.Runs() {
		r := RunDescription{Run: run, Scored: map[string]int{}, Faults: map[string]int{}}
		for _, table := range storedTables {
			ds.describeTable(d, &r, table, inv.Files[table])
		}
		if r.Rounded, err = ds.RoundedStates(run.Name); err != nil {
			d.Damaged = append(d.Damaged, DamagedFile{runDir(dir, schemas.TableStates, run.Name), err.Error()})
		}
		if r.Rounded != nil {
			if r.Effects, err = ds.effects(run, inv.Files[schemas.TableRounds]); err != nil {
				return nil, err
			}
		}
		d.Runs = append(d.Runs, r)
	}
	return d, nil
}

// describeTable adds what the files of one table of a run hold. Of files, it
// takes those of the run.
func (d *Dataset) describeTable(out *Description, r *RunDescription, table string, files []string) {
	byDrafter := map[string]*TableDescription{}
	root := runDir(d.dir, table, r.Name)
	for _, path := range files {
		rel, ok := strings.CutPrefix(path, root+string(filepath.Separator))
		if !ok {
			continue
		}
		drafter, _ := strings.CutPrefix(filepath.Dir(rel), "drafter=")
		if table == schemas.TableStates || filepath.Dir(rel) == "." {
			drafter = ""
		}
		t := byDrafter[drafter]
		if t == nil {
			t = &TableDescription{Table: table, Drafter: drafter}
		}
		if err := d.describePart(r, t, path); err != nil {
			out.Damaged = append(out.Damaged, DamagedFile{path, err.Error()})
			continue
		}
		byDrafter[drafter] = t
	}
	for _, name := range sorted(byDrafter) {
		r.Tables = append(r.Tables, *byDrafter[name])
	}
}

// describePart adds one file to its table and run.
func (d *Dataset) describePart(r *RunDescription, t *TableDescription, path string) error {
	o, err := openPart(path)
	if err != nil {
		return err
	}
	defer o.Close()
	switch t.Table {
	case schemas.TableSequences, schemas.TableRounds:
		list, err := d.readMarker(path)
		if err != nil {
			return err
		}
		if t.Table == schemas.TableSequences {
			r.Sequences += len(list)
		} else {
			r.Scored[t.Drafter] += len(list)
		}
	case schemas.TableFaults:
		rows, err := readRows[schemas.Fault](path)
		if err != nil {
			return err
		}
		for _, f := range rows {
			r.Faults[f.Check]++
		}
	}
	t.Files++
	t.Rows += o.NumRows()
	t.Bytes += o.size
	return nil
}

// String is the description as text for people.
func (d *Description) String() string {
	var b bytes.Buffer
	if d.File != nil {
		d.File.write(&b, d.Path)
	} else {
		fmt.Fprintf(&b, "%s is a draftscope dataset of format %d with %s.\n", d.Path, d.Format, count(len(d.Runs), "run"))
	}
	for _, r := range d.Runs {
		r.write(&b)
	}
	if len(d.Damaged) > 0 {
		fmt.Fprintf(&b, "\n%s left out:\n", count(len(d.Damaged), "file"))
		for _, f := range d.Damaged {
			fmt.Fprintf(&b, "  %s: %s\n", f.Path, f.Reason)
		}
	}
	return b.String()
}

func (r RunDescription) write(w io.Writer) {
	fmt.Fprintf(w, "\nRun %s, made %s by %s %s from target %s\n", r.Name, r.CreatedAt.Format("2006-01-02 15:04:05 MST"), r.Engine, r.EngineVersion, r.Target)
	fmt.Fprintf(w, "  %s of %d values (%s) of %d layers: %s; the last is before the final norm\n",
		count(len(r.States), "state"), r.Hidden, r.DType, r.Layers, strings.Trim(fmt.Sprint(r.States), "[]"))
	if s := r.Rounded; s != nil {
		fmt.Fprintf(w, "  states are rounded to %s: vec takes %d bytes, and %d without loss (of %d as captured)\n", s.Encoding, s.Bytes, s.Lossless, s.Captured)
		for _, e := range s.States {
			fmt.Fprintf(w, "    state %d: cosine of stored and captured %.6f in the mean, %.6f at least, relative error %.3g, over %s\n", e.State, e.MeanCosine(), e.MinCosine, e.RelL2(), count(int(e.Rows), "row"))
		}
		for _, e := range r.Effects {
			fmt.Fprintf(w, "    %s accepts %.3f tokens a round (%s, budget %d) where %s accepts %.3f, over %s\n",
				e.Stored, e.OnStored, e.Method, e.Budget, e.Captured, e.OnCapture, count(e.Sequences, "shared sequence"))
		}
		if len(r.Effects) == 0 {
			fmt.Fprintf(w, "    what that costs a drafter is not known until draftscope replay has put it on the stored states\n")
		}
	} else if r.Rounding != Lossless {
		fmt.Fprintf(w, "  states are rounded to %s\n", r.Rounding)
	}
	for _, f := range []struct{ what, value string }{{"weights", r.Fingerprints.Weights}, {"tokenizer", r.Fingerprints.Tokenizer}, {"template", r.Fingerprints.Template}} {
		if f.value != "" {
			fmt.Fprintf(w, "  %s %s\n", f.what, f.value)
		}
	}
	for _, key := range sorted(r.Options) {
		fmt.Fprintf(w, "  option %s = %s\n", key, r.Options[key])
	}
	fmt.Fprintf(w, "  %s captured\n", count(r.Sequences, "sequence"))
	for _, dr := range r.Drafters {
		fmt.Fprintf(w, "  drafter %s from %s: %s scored\n", dr.Name, dr.Source, count(r.Scored[dr.Name], "sequence"))
	}
	for _, check := range sorted(r.Faults) {
		fmt.Fprintf(w, "  check %s: %s\n", check, count(r.Faults[check], "fault"))
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "table\tdrafter\tfiles\trows\tbytes\t")
	for _, t := range r.Tables {
		fmt.Fprintf(tw, "%s\t%s\t%d\t%d\t%d\t\n", t.Table, t.Drafter, t.Files, t.Rows, t.Bytes)
	}
	tw.Flush()
}

func (f *FileDescription) write(w io.Writer, path string) {
	fmt.Fprintf(w, "%s is a Parquet file of %s in %s, %d bytes", path, count(int(f.Rows), "row"), count(f.RowGroups, "row group"), f.Bytes)
	if f.CreatedBy != "" {
		fmt.Fprintf(w, ", written by %s", f.CreatedBy)
	}
	fmt.Fprintln(w, ".")
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "column\ttype\tcodec\tencodings\tcompressed\tuncompressed")
	for _, c := range f.Columns {
		kind := c.Type
		if c.Optional {
			kind += ", optional"
		}
		if c.Repeated {
			kind += ", repeated"
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%d\t%d\n", c.Name, kind, c.Codec, strings.Join(c.Encodings, " "), c.Compressed, c.Uncompressed)
	}
	tw.Flush()
	for _, key := range sorted(f.Footer) {
		v := f.Footer[key]
		if len(v) > 200 {
			v = v[:200] + "…"
		}
		fmt.Fprintf(w, "%s = %s\n", key, v)
	}
}

// count is "1 run", "2 runs".
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
