//go:build linux

package tap

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// BenchmarkASourceReadsARing reads requests of 512 tokens, six states of 4096
// values in bf16, as fast as one engine can send them.
func BenchmarkASourceReadsARing(b *testing.B) {
	const hidden, states, tokens, requests = 4096, 6, 512, 8
	const slotBytes, slots = states * hidden * 2, 2 * requests * tokens
	dir, err := os.MkdirTemp("", "tap") //nolint:usetesting // a socket's path is short
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	l, err := Listen(filepath.Join(dir, "s"))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	d := &daemon{t: b, path: l.path, l: l}
	e := d.dial()
	e.send(map[string]any{
		"type": typeHello, "protocol": Protocol, "engine": "bench", "engine_version": "1", "pid": 1, "dtype": "bf16",
		"model": map[string]any{"label": "m", "layers": 36, "hidden": hidden, "vocab": 1 << 17},
	})
	first, err := l.Accept(b.Context(), func(err error) { b.Error(err) })
	if err != nil {
		b.Fatal(err)
	}
	if d.src, err = NewSource(l, first, Config{Run: "r1", States: []int{1, 9, 17, 25, 33, 36}, Memory: 2 << 30, Once: true}); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { d.src.Close() })
	e.hear(typeWelcome)
	e.offerSlots(slots, slotBytes, nil, true)
	for i := 64; i < len(e.ring); i++ {
		e.ring[i] = byte(i) & 0x3f
	}
	e.hear(typeCredit)
	ids := make([]int32, tokens)
	for i := range ids {
		ids[i] = int32(100_000 + i)
	}
	go func() { // the ring says what was read
		for {
			if _, _, _, err := readFrame(e.in, nil); err != nil {
				return
			}
		}
	}()
	n := 0
	for b.Loop() {
		var list []map[string]any
		for r := range requests {
			name := fmt.Sprintf("q%d-%d", n, r)
			e.begin(name, ids...)
			list = append(list, map[string]any{"r": name, "pos": 0, "ids": ids, "slot": e.slot + uint64(r*tokens)})
		}
		for e.slot+requests*tokens > binary.LittleEndian.Uint64(e.ring)+slots {
			time.Sleep(100 * time.Microsecond)
		}
		e.slot += requests * tokens
		e.step(list...)
		for r := range requests {
			e.finish(fmt.Sprintf("q%d-%d", n, r), tokens, ids...)
		}
		n++
		for range requests {
			for last := false; !last; {
				_, rec, l, err := d.src.Next(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				rec.Release()
				last = l
			}
		}
	}
	b.SetBytes(slotBytes * requests * tokens)
	b.ReportMetric(float64(requests*tokens*b.N)/b.Elapsed().Seconds(), "tokens/s")
	if s := d.src.Status(); s.Faults != 0 || s.Stored != int64(n*requests) {
		b.Errorf("%+v of %d requests", s.Counts, n*requests)
	}
}
