package data

import (
	"bytes"
	"encoding/binary"
	"errors"
	"runtime"
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
