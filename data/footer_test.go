package data

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
)

// asFile wraps a footer as a Parquet file of no row group.
func asFile(footer []byte) []byte {
	b := append([]byte("PAR1"), footer...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(footer)))
	return append(b, "PAR1"...)
}

func TestAFooterThatAsksForTooMuchMemoryIsRefused(t *testing.T) {
	huge := []byte{0xff, 0xff, 0xff, 0xff, 0x07} // 2^31-1
	for name, footer := range map[string][]byte{
		"a list of row groups":       append([]byte{0x15, 0x02, 0x39, 0xfc}, huge...),
		"a list of schema elements":  append([]byte{0x15, 0x02, 0x19, 0xfc}, huge...),
		"a million empty row groups": append([]byte{0x15, 0x02, 0x39, 0xfc, 0xc0, 0x84, 0x3d}, make([]byte, 1_000_000)...),
		"a string":                   append([]byte{0x68}, huge...),
		"a map":                      append(append([]byte{0x1b}, huge...), 0x88),
		"lists in lists":             append([]byte{0x19}, bytes.Repeat([]byte{0x19}, 100_000)...),
		"structs in structs":         bytes.Repeat([]byte{0x1c}, 100_000),
		"nothing":                    {},
		"an unknown type":            {0x1f, 0x00},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		start := time.Now()
		b := asFile(footer)
		o := &openedPart{path: name, size: int64(len(b))}
		err := guard(func() error { return o.open(bytes.NewReader(b)) })
		took := time.Since(start)
		runtime.ReadMemStats(&after)
		if !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v, want ErrDamaged", name, err)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > 64<<20 || took > time.Second {
			t.Errorf("%s: %d bytes and %s to refuse it", name, n, took)
		}
	}
}

func TestAFooterIsWhatWasWritten(t *testing.T) {
	d, _ := smallDataset(t, t.TempDir())
	for _, table := range storedTables[:6] {
		path := partsOf(t, d, table)[0]
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		length := int(binary.LittleEndian.Uint32(whole[len(whole)-8:]))
		name := bytes.LastIndex(whole, []byte(keyTail)) // without it, a file of before the digest
		for at := len(whole) - 8 - length; at < len(whole); at += 6 {
			if at >= name-2 && at < name+len(keyTail) {
				continue
			}
			b := bytes.Clone(whole)
			b[at] ^= 1 << (at % 8)
			if err := os.WriteFile(path, b, 0o644); err != nil {
				t.Fatal(err)
			}
			o, err := openPart(path)
			if err != nil {
				continue
			}
			ours := o.ours()
			inv, err := Take(t.Context(), d.Dir())
			if err := errors.Join(err, o.Close()); err != nil {
				t.Fatal(err)
			}
			if ours || len(inv.LeftOut) != 3 { // the whole commit
				t.Errorf("%s: a bit of byte %d of %d (%q) was flipped, and nothing is said", table, at, len(whole), whole[at-8:at+8])
			}
		}
		if err := os.WriteFile(path, whole, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// A footer without a digest of its own, or with one of the wrong content, is
// held against the rows.
func TestResultsAreHeldAgainstTheirDigest(t *testing.T) {
	d, _ := smallDataset(t, t.TempDir())
	check := func() (damaged []string) {
		err := d.CheckResults(t.Context(), "r1", func(path string, err error) { damaged = append(damaged, path+": "+err.Error()) })
		if err != nil {
			t.Fatal(err)
		}
		return damaged
	}
	if got := check(); len(got) != 0 {
		t.Errorf("of a whole dataset: %q", got)
	}
	marker := partsOf(t, d, "rounds")[0]
	list, err := d.readMarker(marker)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(marker)
	if err != nil {
		t.Fatal(err)
	}
	b = bytes.ReplaceAll(b, []byte(list[0].Digest), []byte("0123456789abcdef"))
	o, err := openPart(marker)
	if err != nil {
		t.Fatal(err)
	}
	body, err := strconv.Atoi(o.kv(keyBody))
	if err = errors.Join(err, o.Close()); err != nil {
		t.Fatal(err)
	}
	tail := b[body:]
	copy(tail[tailDigest(tail):], noDigest)
	if err := errors.Join(vouch(tail), os.WriteFile(marker, b, 0o644)); err != nil {
		t.Fatal(err)
	}
	if got := check(); len(got) != 1 || !strings.Contains(got[0], "stored was 0123456789abcdef; restore the file, or delete") {
		t.Errorf("of a marker that says another digest: %q", got)
	}
}
