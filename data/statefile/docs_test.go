package statefile

import (
	"bytes"
	"encoding/hex"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/schemas"
)

// The example of a page in docs/dataset.md is what the writer writes.
func TestTheDocumentedPageIsWhatIsWritten(t *testing.T) {
	doc, err := os.ReadFile("../../docs/dataset.md")
	if err != nil {
		t.Fatal(err)
	}
	var want []byte
	line := regexp.MustCompile(`^    ((?:[0-9a-f]{2} +)+)`)
	_, example, found := strings.Cut(string(doc), "page header left out:")
	for l := range strings.Lines(example) {
		m := line.FindStringSubmatch(l)
		if m == nil {
			if len(want) > 0 {
				break
			}
			continue
		}
		b, err := hex.DecodeString(strings.ReplaceAll(m[1], " ", ""))
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, b...)
	}
	if !found || len(want) < 40 {
		t.Fatalf("the example has %d bytes", len(want))
	}
	raw := schemas.BF16.AppendBytes(nil, []float32{1, -2, 0.5, 3, 1, 1, 1, 1})
	var out bytes.Buffer
	w, err := NewWriter(&out, Config{DType: schemas.BF16, Hidden: 4, Workers: 1})
	if err == nil {
		err = w.Write(Rows{SeqID: "a", State: 2, Norms: AppendNorms(nil, schemas.BF16, 4, raw), Raw: raw})
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil || !bytes.Contains(out.Bytes(), want) {
		t.Errorf("% x is not in the file (%v)", want, err)
	}
}
