package backendtest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

// inBytes is values in a dtype.
func inBytes(values []float32, as cuda.DType) []byte {
	var out []byte
	if as == cuda.F32 {
		for _, v := range values {
			out = binary.LittleEndian.AppendUint32(out, math.Float32bits(v))
		}
		return out
	}
	for _, v := range rounded(values) {
		out = binary.LittleEndian.AppendUint16(out, uint16(math.Float32bits(v)>>16))
	}
	return out
}

var dtypes = []cuda.DType{cuda.F32, cuda.BF16}

// testLoad loads values that every device holds exactly.
func testLoad(t *testing.T, l *lab) {
	for _, lay := range layouts {
		for _, as := range dtypes {
			t.Run(fmt.Sprintf("%s, %d bytes a value", lay.name, as.Size()), func(t *testing.T) {
				for _, e := range edges() {
					values := random16(1, 5, e)
					l := l.in(lay)
					dst := l.room(t, 5, e)
					must(t, l.d.Load(dst, inBytes(values, as), as))
					same(t, "loaded", l.get(t, dst), values)
				}
			})
		}
	}
	t.Run("shapes that do not fit are refused", func(t *testing.T) {
		dst := l.room(t, 2, 3)
		refused(t, "bytes", l.d.Load(dst, make([]byte, 13), cuda.BF16))
		refused(t, "values", l.d.Load(dst, make([]byte, 12), cuda.F32))
	})
	must(t, l.d.Load(l.room(t, 0, 3), nil, cuda.BF16))
}

// fetched is what lands of rows, cut into landings at the given rows. Host
// memory is the device's own, or any.
func fetched(t testing.TB, l *lab, src cuda.Tensor, as cuda.DType, own bool, at ...int) ([]byte, []int32) {
	t.Helper()
	all := make([]byte, src.Rows*src.Cols*as.Size())
	if own && len(all) > 0 {
		mem, err := l.d.HostAlloc(len(all))
		must(t, err)
		defer l.d.HostFree(mem)
		all = mem
	}
	var to []cuda.Landing
	lo := 0
	for _, hi := range append(at, src.Rows) {
		width := src.Cols * as.Size()
		to = append(to, cuda.Landing{Lo: lo, Hi: hi, To: all[lo*width : hi*width]})
		lo = hi
	}
	f, err := l.d.Fetch(src, as, to)
	must(t, err)
	odd, err := f.Wait()
	must(t, err)
	return bytes.Clone(all), odd
}

func testFetch(t *testing.T, l *lab) {
	for _, lay := range layouts {
		for _, as := range dtypes {
			t.Run(fmt.Sprintf("%s, %d bytes a value", lay.name, as.Size()), func(t *testing.T) {
				l := l.in(lay)
				for _, s := range [][2]int{{1, 1}, {7, 33}, {17, 64}, {300, 200}, {700, 2048}} {
					for _, own := range []bool{true, false} {
						values := random16(3, s[0], s[1])
						if l.d.DType() == cuda.F32 {
							values = random(3, s[0], s[1])
						}
						got, odd := fetched(t, l, l.put(t, values, s[1]), as, own, s[0]/3, s[0]/3, s[0]/2)
						if !bytes.Equal(got, inBytes(values, as)) {
							t.Fatalf("%v: other bytes arrived", s)
						}
						for i, n := range odd {
							if n != 0 {
								t.Fatalf("%v: row %d of finite values counts %d that are not", s, i, n)
							}
						}
					}
				}
			})
		}
	}
	t.Run("NaN and Inf are counted by row", func(t *testing.T) {
		for _, cols := range []int{64, 33} {
			values := random16(1, 20, cols)
			values[3*cols], values[3*cols+32], values[7*cols+5], values[19*cols+cols-1] = nan, inf, -inf, nan
			for _, as := range dtypes {
				_, odd := fetched(t, l, l.put(t, values, cols), as, true)
				for i, want := range map[int]int32{0: 0, 3: 2, 7: 1, 18: 0, 19: 1} {
					if odd[i] != want {
						t.Errorf("row %d counts %d values, want %d", i, odd[i], want)
					}
				}
			}
		}
		if l.d.DType() == cuda.F32 { // what rounds to Inf counts
			_, odd := fetched(t, l, l.put(t, []float32{math.MaxFloat32, 1}, 1), cuda.BF16, true)
			if odd[0] != 1 || odd[1] != 0 {
				t.Errorf("counts are %v, want 1 and 0", odd)
			}
		}
	})
	t.Run("what lands is what was there when it was fetched", func(t *testing.T) {
		const rows, cols, turns = 600, 2048, 8
		x := l.room(t, rows, cols)
		var flights []cuda.Flight
		var memory [][]byte
		for i := range turns {
			must(t, l.d.Load(x, inBytes(random16(uint64(i), rows, cols), cuda.BF16), cuda.BF16))
			mem, err := l.d.HostAlloc(rows * cols * 2)
			must(t, err)
			f, err := l.d.Fetch(x, cuda.BF16, []cuda.Landing{{Lo: 0, Hi: rows, To: mem}})
			must(t, err)
			must(t, l.d.GateMul(x, x, x, cuda.SiLU))
			flights, memory = append(flights, f), append(memory, mem)
		}
		for i, f := range flights {
			_, err := f.Wait()
			must(t, err)
			if !bytes.Equal(memory[i], inBytes(random16(uint64(i), rows, cols), cuda.BF16)) {
				t.Errorf("turn %d landed other bytes", i)
			}
			l.d.HostFree(memory[i])
		}
	})
	t.Run("nothing in, nothing out", func(t *testing.T) {
		for _, s := range [][2]int{{0, 8}, {8, 0}, {0, 0}} {
			fetched(t, l, l.room(t, s[0], s[1]), cuda.BF16, true)
		}
		odd := l.put(t, random16(1, 4, 8), 8)
		f, err := l.d.Fetch(odd, cuda.F32, nil) // counts alone
		must(t, err)
		if counts, err := f.Wait(); err != nil || len(counts) != 4 {
			t.Errorf("counts are %v, %v; want four", counts, err)
		}
	})
	t.Run("shapes that do not fit are refused", func(t *testing.T) {
		src := l.room(t, 4, 8)
		for what, landing := range map[string]cuda.Landing{
			"too few bytes": {Lo: 0, Hi: 2, To: make([]byte, 31)},
			"far row":       {Lo: 3, Hi: 5, To: make([]byte, 32)},
			"turned round":  {Lo: 3, Hi: 2},
		} {
			_, err := l.d.Fetch(src, cuda.BF16, []cuda.Landing{landing})
			refused(t, what, err)
		}
		if _, err := l.d.HostAlloc(-1); !errors.Is(err, cuda.ErrMemory) {
			t.Errorf("a negative size: %v", err)
		}
	})
}
