//go:build cgo

package query

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Many bits of a footer are turned in turn: whatever that does to the file, the
// dataset opens, and what DuckDB alone refuses is left out with its commit.
func TestATurnedBitInAFooterDoesNotStopTheDataset(t *testing.T) {
	const part = "run=r/drafter=d/part-00-000000000001-000000000001.parquet"
	dir := scored(t)
	path := filepath.Join(dir, "rounds", filepath.FromSlash(part))
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// The file is one of before footers had a digest, which finds every bit.
	digest := bytes.LastIndex(whole, []byte("draftscope.tail_digest"))
	if digest < 0 {
		t.Fatal("the footer has no digest")
	}
	whole[digest] = 'D'
	n := len(whole)
	start := n - 8 - int(binary.LittleEndian.Uint32(whole[n-8:]))
	refused := 0
	for at := start; at < n-8; at += 11 {
		b := append([]byte(nil), whole...)
		b[at] ^= 1 << (at % 8)
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		db, err := Open(t.Context(), dir, Options{})
		if err != nil {
			t.Fatalf("bit %d of byte %d: %v", at%8, at, err)
		}
		for _, w := range db.Warnings() {
			if strings.Contains(w.Reason, "DuckDB cannot read") {
				refused++
				if w.File != "rounds/"+part || len(db.Warnings()) != 3 {
					t.Errorf("byte %d: warnings %v", at, db.Warnings())
				}
				wantRows(t, db, 0, "SELECT DISTINCT seq_id FROM slots", row("b"))
			}
		}
		db.Close()
	}
	t.Logf("%d bits turned, DuckDB refused the file for %d that we had not", (n-8-start)/11, refused)
	if refused == 0 {
		t.Error("no bit was DuckDB's alone to refuse: the test shows nothing")
	}
}
