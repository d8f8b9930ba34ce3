package schemas

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"

	"github.com/apache/arrow/go/v17/arrow"
)

// Envelope says what a record is. It travels in the metadata of the record's
// Arrow schema, so that a record explains itself wherever it lies.
type Envelope struct {
	Table   string
	Run     string
	Drafter string // only for drafts, slots and rounds
}

const (
	keyTable   = "draftscope.table"
	keyRun     = "draftscope.run"
	keyDrafter = "draftscope.drafter"
	keyFormat  = "draftscope.format"
)

func (e Envelope) metadata() (keys, values []string) {
	keys = []string{keyFormat, keyTable, keyRun}
	values = []string{strconv.Itoa(FormatVersion), e.Table, e.Run}
	if e.Drafter != "" {
		keys, values = append(keys, keyDrafter), append(values, e.Drafter)
	}
	return keys, values
}

// EnvelopeOf reads a record's envelope. It refuses a record without one, or
// of a newer format.
func EnvelopeOf(rec arrow.Record) (Envelope, error) {
	md := rec.Schema().Metadata()
	get := func(key string) string {
		v, _ := md.GetValue(key)
		return v
	}
	e := Envelope{Table: get(keyTable), Run: get(keyRun), Drafter: get(keyDrafter)}
	if e.Table == "" {
		return e, fmt.Errorf("%w: no table name in its metadata", ErrRecord)
	}
	if v := get(keyFormat); v != strconv.Itoa(FormatVersion) {
		return e, fmt.Errorf("%w: table %s has format %q, this program reads %d; use the program that wrote it or a newer one", ErrFormat, e.Table, v, FormatVersion)
	}
	return e, nil
}

// Fingerprint is a short hash of a schema's columns: names, types, nullability
// and column metadata, in order. The envelope does not enter it.
func Fingerprint(s *arrow.Schema) string {
	h := sha256.New()
	for _, f := range s.Fields() {
		fmt.Fprintf(h, "%s|%s|%t|", f.Name, f.Type.Fingerprint(), f.Nullable)
		for i, k := range f.Metadata.Keys() {
			fmt.Fprintf(h, "%s=%s;", k, f.Metadata.Values()[i])
		}
		fmt.Fprintln(h)
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}
