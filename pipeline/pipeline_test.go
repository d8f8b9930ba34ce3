package pipeline

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/cespare/xxhash/v2"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("PIPELINE_TEST_CHILD"); dir != "" {
		os.Exit(crashChild(dir))
	}
	goleak.VerifyTestMain(m)
}

const testWidth = 64

var testSchema = arrow.NewSchema([]arrow.Field{
	{Name: "seq", Type: arrow.BinaryTypes.String},
	{Name: "pos", Type: arrow.PrimitiveTypes.Int32},
	{Name: "tag", Type: arrow.BinaryTypes.String, Nullable: true},
	{Name: "vec", Type: &arrow.FixedSizeBinaryType{ByteWidth: testWidth}},
	{Name: "list", Type: arrow.ListOfNonNullable(arrow.PrimitiveTypes.Float32)},
}, nil)

// testRecord has rows from..to-1 of a sequence; every value follows from them.
func testRecord(mem memory.Allocator, seq string, from, to int) arrow.Record {
	b := array.NewRecordBuilder(mem, testSchema)
	defer b.Release()
	for i := from; i < to; i++ {
		b.Field(0).(*array.StringBuilder).Append(seq)
		b.Field(1).(*array.Int32Builder).Append(int32(i))
		if i%3 == 0 {
			b.Field(2).AppendNull()
		} else {
			b.Field(2).(*array.StringBuilder).Append(strings.Repeat("x", i%5))
		}
		v := make([]byte, testWidth)
		for j := range v {
			v[j] = byte(i*31 + j*7 + len(seq))
		}
		b.Field(3).(*array.FixedSizeBinaryBuilder).Append(v)
		l := b.Field(4).(*array.ListBuilder)
		l.Append(true)
		for j := range i % 4 {
			l.ValueBuilder().(*array.Float32Builder).Append(float32(i) + float32(j)/4)
		}
	}
	return b.NewRecord()
}

// rowsOf spells each row out, so that cuts do not show.
func rowsOf(rec arrow.Record) []string {
	rows := make([]string, rec.NumRows())
	for i := range rows {
		for c := range int(rec.NumCols()) {
			rows[i] += rec.Column(c).ValueStr(i) + "|"
		}
	}
	return rows
}

// testSource gives n sequences of some records each.
type testSource struct {
	mem     memory.Allocator
	ids     []string
	records int
	rows    int
	at, rec int
	onNext  func(seq string, rec int) error
}

func (s *testSource) Next(ctx context.Context) (string, arrow.Record, bool, error) {
	if err := ctx.Err(); err != nil {
		return "", nil, false, err
	}
	if s.at == len(s.ids) {
		return "", nil, false, io.EOF
	}
	seq, from := s.ids[s.at], s.rec*s.rows
	if s.onNext != nil {
		if err := s.onNext(seq, s.rec); err != nil {
			return "", nil, false, err
		}
	}
	rec := testRecord(s.mem, seq, from, from+s.rows)
	s.rec++
	last := s.rec == s.records
	if last {
		s.at, s.rec = s.at+1, 0
	}
	return seq, rec, last, nil
}

func ids(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("seq %03d/%%ü", i)
	}
	return out
}

// testStage emits every tenth row at once and one row more at the end, however
// the records are cut.
type testStage struct {
	mem     memory.Allocator
	rows    map[string]int
	fail    func(seq string) error
	dropped []string
}

func (s *testStage) Process(_ context.Context, seq string, rec arrow.Record, emit func(arrow.Record) error) error {
	if s.fail != nil {
		if err := s.fail(seq); err != nil {
			return err
		}
	}
	if got := rec.Column(1).(*array.Int32).Value(0); int(got) != s.rows[seq] {
		return fmt.Errorf("stage got position %d, due was %d", got, s.rows[seq])
	}
	from := s.rows[seq]
	s.rows[seq] += int(rec.NumRows())
	for i := range rec.NumRows() {
		if (from+int(i))%10 != 0 {
			continue
		}
		part := rec.NewSlice(i, i+1)
		err := emit(part)
		part.Release()
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *testStage) End(_ context.Context, seq string, emit func(arrow.Record) error) error {
	rec := testRecord(s.mem, seq, s.rows[seq], s.rows[seq]+1)
	defer rec.Release()
	delete(s.rows, seq)
	return emit(rec)
}

func (s *testStage) Drop(seq string) { delete(s.rows, seq); s.dropped = append(s.dropped, seq) }

// shelf is what test sinks store durably: a folder of commit files, each a
// whole one or none, deduplicated by sequence and content.
type shelf struct {
	dir     string
	mu      sync.Mutex
	stored  map[string]map[string]storedSeq // stream -> seq
	repeats int
	commits int
	drops   int
}

type storedSeq struct {
	Rows   int
	Digest uint64
	Text   []string `json:"-"`
}

func openShelf(dir string) (*shelf, error) {
	s := &shelf{dir: dir, stored: map[string]map[string]storedSeq{CaptureStream: {}, ResultsStream: {}}}
	if dir == "" {
		return s, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	names, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		var content map[string]storedSeq
		if err := json.Unmarshal(b, &content); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		stream, _, _ := strings.Cut(filepath.Base(name), "-")
		for seq, v := range content {
			if _, ok := s.stored[stream][seq]; ok {
				return nil, fmt.Errorf("sequence %q of %s is stored twice", seq, stream)
			}
			s.stored[stream][seq] = v
		}
	}
	return s, nil
}

func (s *shelf) sink(stream string, partition int) (Sink, error) {
	return &shelfSink{shelf: s, stream: stream, partition: partition, open: map[string]*storedSeq{}, ended: map[string]storedSeq{}}, nil
}

type shelfSink struct {
	shelf     *shelf
	stream    string
	partition int
	open      map[string]*storedSeq
	ended     map[string]storedSeq
	pending   int64
	last      uint64
}

func (k *shelfSink) Write(_ context.Context, seq string, rec arrow.Record) error {
	o := k.open[seq]
	if o == nil {
		o = new(storedSeq)
		k.open[seq] = o
	}
	o.Text = append(o.Text, rowsOf(rec)...)
	o.Rows += int(rec.NumRows())
	k.pending += rec.NumRows() * testWidth
	return nil
}

func (k *shelfSink) End(_ context.Context, seq string, streamSeq uint64) error {
	if streamSeq <= k.last {
		return fmt.Errorf("stream sequence %d after %d", streamSeq, k.last)
	}
	k.last = streamSeq
	o := k.open[seq]
	if o == nil {
		o = new(storedSeq)
	}
	delete(k.open, seq)
	o.Digest = xxhash.Sum64String(strings.Join(o.Text, "\n"))
	if _, ok := k.ended[seq]; ok {
		return fmt.Errorf("sequence %q ended twice between commits", seq)
	}
	k.ended[seq] = *o
	return nil
}

func (k *shelfSink) Drop(seq string) {
	delete(k.open, seq)
	k.shelf.mu.Lock()
	defer k.shelf.mu.Unlock()
	k.shelf.drops++
}

func (k *shelfSink) Pending() int64 { return k.pending }

func (k *shelfSink) Commit(context.Context) error {
	s := k.shelf
	s.mu.Lock()
	defer s.mu.Unlock()
	fresh := map[string]storedSeq{}
	for seq, v := range k.ended {
		if have, ok := s.stored[k.stream][seq]; ok {
			if have.Digest != v.Digest || have.Rows != v.Rows {
				return fmt.Errorf("sequence %q comes again with other content", seq)
			}
			s.repeats++
			continue
		}
		fresh[seq] = v
	}
	if s.dir != "" && len(fresh) > 0 {
		b, err := json.Marshal(fresh)
		if err != nil {
			return err
		}
		name := filepath.Join(s.dir, fmt.Sprintf("%s-%d-%s", k.stream, k.partition, rand.Text()))
		if err := os.WriteFile(name+".tmp", b, 0o644); err != nil {
			return err
		}
		if err := os.Rename(name+".tmp", name+".json"); err != nil {
			return err
		}
	}
	maps.Copy(s.stored[k.stream], fresh)
	s.commits++
	clear(k.ended)
	k.pending = 0
	return nil
}

func (k *shelfSink) Close() error { return nil }

// want is what a shelf must hold after the whole of a source went through.
func want(ids []string, records, rows int) (capture, results map[string]storedSeq) {
	mem := memory.NewGoAllocator()
	capture, results = map[string]storedSeq{}, map[string]storedSeq{}
	for _, seq := range ids {
		all := testRecord(mem, seq, 0, records*rows+1)
		text := rowsOf(all)
		c := text[:records*rows]
		capture[seq] = storedSeq{Rows: len(c), Digest: xxhash.Sum64String(strings.Join(c, "\n"))}
		var r []string
		for i := 0; i < records*rows; i += 10 {
			r = append(r, text[i])
		}
		r = append(r, text[records*rows])
		results[seq] = storedSeq{Rows: len(r), Digest: xxhash.Sum64String(strings.Join(r, "\n"))}
		all.Release()
	}
	return capture, results
}

func (s *shelf) check(t *testing.T, stream string, want map[string]storedSeq) {
	t.Helper()
	if err := s.differs(stream, want); err != nil {
		t.Error(err)
	}
}

func (s *shelf) differs(stream string, want map[string]storedSeq) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for seq, w := range want {
		if got, ok := s.stored[stream][seq]; !ok {
			errs = append(errs, fmt.Errorf("%s: sequence %q is missing", stream, seq))
		} else if got.Rows != w.Rows || got.Digest != w.Digest {
			errs = append(errs, fmt.Errorf("%s: sequence %q has %d rows with digest %x, want %d with %x", stream, seq, got.Rows, got.Digest, w.Rows, w.Digest))
		}
	}
	if len(s.stored[stream]) != len(want) {
		errs = append(errs, fmt.Errorf("%s: %d sequences are stored, want %d", stream, len(s.stored[stream]), len(want)))
	}
	return errors.Join(errs...)
}

func stages(mem memory.Allocator, fail func(seq string) error) NewStage {
	return func(int) (Stage, error) {
		return &testStage{mem: mem, rows: map[string]int{}, fail: fail}, nil
	}
}

// checked is an allocator that fails the test if anything is left in it.
func checked(t testing.TB) *memory.CheckedAllocator {
	mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
	t.Cleanup(func() { mem.AssertSize(t, 0) })
	return mem
}

func TestASequenceGoesThroughStageAndSinksWholeAndInOrder(t *testing.T) {
	for _, tc := range []struct {
		name              string
		partitions, chunk int
		records, rows     int
	}{
		{"one partition", 1, 0, 3, 20},
		{"three partitions", 3, 0, 3, 20},
		{"chunks of a few rows", 2, 2500, 2, 200},
		{"single rows", 2, 0, 15, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			mem := checked(t)
			all := ids(12)
			sh, _ := openShelf("")
			cfg := Config{Run: "run.1 ü", Dir: t.TempDir(), Partitions: tc.partitions, ChunkBytes: tc.chunk, Allocator: mem}
			src := &testSource{mem: mem, ids: slices.Clone(all), records: tc.records, rows: tc.rows}
			sum, err := Run(t.Context(), cfg, src, stages(mem, nil), sh.sink)
			if err != nil {
				t.Fatal(err)
			}
			capture, results := want(all, tc.records, tc.rows)
			sh.check(t, CaptureStream, capture)
			sh.check(t, ResultsStream, results)
			if sum.Published != 12 || sum.Processed != 12 || sum.Stored != 12 || sum.ResultsStored != 12 || sum.Faults != 0 || sum.Drained || sum.Lag() != 0 {
				t.Errorf("summary %+v", sum)
			}
			if sum.Rows != int64(12*tc.records*tc.rows) {
				t.Errorf("%d rows published", sum.Rows)
			}
			if sh.repeats+sh.drops != 0 {
				t.Errorf("%d repeats, %d drops in a run without faults", sh.repeats, sh.drops)
			}
		})
	}
}
