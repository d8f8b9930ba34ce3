//go:build cuda && cgo

package gpu_test

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// trap is a kernel that fails as it runs.
const trap = `.version 8.0
.target sm_80
.address_size 64
.visible .entry trap() { trap; ret; }
`

// TestAKernelThatFailsIsNamed runs in a process of its own: such a failure
// ends the context for all.
func TestAKernelThatFailsIsNamed(t *testing.T) {
	must(t, open(t).Close())
	if os.Getenv("DRAFTSCOPE_TEST_TRAP") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestAKernelThatFailsIsNamed$", "-test.v")
		cmd.Env = append(os.Environ(), "DRAFTSCOPE_TEST_TRAP=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	card, err := driver.Open(0)
	must(t, err)
	err = card.Do(func() error {
		m, err := card.Module("trap", []byte(trap))
		if err != nil {
			return err
		}
		k, err := m.Kernel("trap")
		if err != nil {
			return err
		}
		return errors.Join(card.Launch(k, driver.Grid{}), card.Wait())
	})
	if err == nil || !strings.Contains(err.Error(), "running kernels trap on ") {
		t.Errorf("a kernel that fails gives %v", err)
	}
	again := card.Do(func() error { return nil })
	if again == nil || !strings.Contains(again.Error(), "lost to this process, run again, or use --backend cpu") {
		t.Errorf("after that, the device says %v", again)
	}
	card.Close()
}

func TestCodeThatDoesNotCompileIsNamed(t *testing.T) {
	must(t, open(t).Close())
	card, err := driver.Open(0)
	must(t, err)
	defer card.Close()
	err = card.Do(func() error {
		_, err := card.Module("broken", []byte(strings.Replace(trap, "trap; ret;", "trip;", 1)))
		return err
	})
	if err == nil || !strings.Contains(err.Error(), "loading kernels broken for ") || !strings.Contains(err.Error(), "trip") {
		t.Errorf("broken code gives %v", err)
	}
}

func TestTooLittleMemorySaysHowMuchThereIs(t *testing.T) {
	d := open(t)
	defer d.Close()
	_, err := d.New(1 << 39) // 2 TiB
	if !errors.Is(err, cuda.ErrMemory) {
		t.Fatalf("2 TiB gave %v", err)
	}
	if s := err.Error(); !strings.Contains(s, "GiB free") || !strings.Contains(s, "--backend cpu") {
		t.Errorf("%q has no number or no remedy", s)
	}
	// The device is none the worse, and neither is a buffer that cannot grow so
	// far, short or in pages.
	for _, n := range []int{10, 1 << 20} {
		buf, err := d.Grow(nil, n)
		must(t, err)
		must(t, d.Upload(cuda.Matrix(buf, 1, 2), []float32{1, 2}))
		if _, err := d.Grow(buf, 1<<39); !errors.Is(err, cuda.ErrMemory) || !strings.Contains(err.Error(), "GiB free") {
			t.Errorf("growing to 2 TiB gave %v", err)
		}
		got := make([]float32, 2)
		must(t, d.Download(got, cuda.Matrix(buf, 1, 2)))
		if buf.Len() != n || got[0] != 1 || got[1] != 2 {
			t.Errorf("after that the buffer has %d values, %v first", buf.Len(), got)
		}
		buf.Close()
	}
}

func TestDevicesOfOneCardShareMemory(t *testing.T) {
	one, two := open(t), open(t)
	buf, err := one.New(6)
	must(t, err)
	m := cuda.Matrix(buf, 2, 3)
	must(t, one.Upload(m, []float32{1, 2, 3, 4, 5, 6}))
	out, err := two.New(4)
	must(t, err)
	must(t, two.Gemm(cuda.Matrix(out, 2, 2), m, m, false))
	got := make([]float32, 4)
	must(t, two.Download(got, cuda.Matrix(out, 2, 2)))
	if want := [4]float32{14, 32, 32, 77}; [4]float32(got) != want {
		t.Errorf("product is %v, want %v", got, want)
	}
	out.Close()
	must(t, two.Close())
	must(t, one.Download(make([]float32, 6), m)) // still open
	buf.Close()
	must(t, one.Close())
}
