package backendtest

import (
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

func testMemory(t *testing.T, l *lab) {
	t.Run("new memory is zero", func(t *testing.T) {
		buf, err := l.d.New(1000)
		must(t, err)
		defer buf.Close()
		if buf.Len() != 1000 {
			t.Errorf("Len() = %d, want 1000", buf.Len())
		}
		got := make([]float32, 1000)
		must(t, l.d.Download(got, cuda.Matrix(buf, 10, 100)))
		same(t, "new memory", got, make([]float32, 1000))
	})
	t.Run("a view comes back as it went", func(t *testing.T) {
		for _, lay := range layouts {
			values := random(1, 7, 13)
			l := l.in(lay)
			same(t, lay.name, l.get(t, l.put(t, values, 13)), values)
		}
	})
	t.Run("empty buffers and views are fine", func(t *testing.T) {
		buf, err := l.d.New(0)
		must(t, err)
		must(t, l.d.Upload(cuda.Matrix(buf, 0, 5), nil))
		must(t, l.d.Download(nil, cuda.Tensor{}))
		buf.Close()
		buf.Close()
	})
	t.Run("a mistaken size is an error", func(t *testing.T) {
		_, err := l.d.New(-1)
		refused(t, "negative", err)
		if _, err := l.d.New(1 << 50); err == nil {
			t.Error("a petabyte was allocated")
		}
	})
	t.Run("views that leave their buffer are refused", func(t *testing.T) {
		m := l.put(t, random(1, 4, 4), 4)
		values := make([]float32, 64)
		refused(t, "too few values", l.d.Upload(m, values[:15]))
		refused(t, "too many values", l.d.Download(values, m))
		past := m
		past.Off++
		refused(t, "offset", l.d.Upload(past, values[:16]))
		past.Off = -1
		refused(t, "negative offset", l.d.Download(values[:16], past))
		narrow := m
		narrow.Stride = 3
		refused(t, "stride", l.d.Download(values[:16], narrow))
		refused(t, "no buffer", l.d.Download(values[:16], cuda.Tensor{Rows: 4, Cols: 4, Stride: 4}))
	})
	t.Run("closed memory is refused", func(t *testing.T) {
		buf, err := l.d.New(4)
		must(t, err)
		buf.Close()
		refused(t, "closed", l.d.Download(make([]float32, 4), cuda.Matrix(buf, 2, 2)))
	})
}
