//go:build cuda && cgo

package gpu

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
	"github.com/draftscope/draftscope/cuda/kernels"
)

// Device is the backend on a GPU. Like every [cuda.Device] it serves one
// caller at a time; distinct devices may be used at once.
type Device struct {
	card      *driver.Card
	precision Precision
	plain     bool
	width     int          // bytes of a value
	blas      *driver.BLAS // nil in float32, and where the machine has none
	ways      map[ways]*driver.Way
	kernels   map[string]*driver.Kernel // by launch's names
	turns     map[turning][]float64
	host      staging
	pinned    pinned    // host memory that callers hold
	shots     snapshots // on their way to it
	params    params
	rooms     map[string]*room
	spare     spares
	closed    sync.Once
}

var _ cuda.Device = (*Device)(nil)

// Built says whether the program has the backend, whatever the machine has.
const Built = true

// Open opens a CUDA device. Errors about what the machine lacks wrap
// [cuda.ErrUnavailable] and say what to do.
func Open(cfg Config) (cuda.Device, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	card, err := driver.Open(cfg.Device)
	if err != nil {
		return nil, fmt.Errorf("opening CUDA device %d: %w", cfg.Device, err)
	}
	d := &Device{
		card: card, precision: cfg.Precision, plain: cfg.Plain, width: 4,
		ways: map[ways]*driver.Way{}, kernels: map[string]*driver.Kernel{}, turns: map[turning][]float64{}, rooms: map[string]*room{},
	}
	if cfg.Precision == BF16 {
		d.width = 2
	}
	if err := card.Do(d.prepare); err != nil {
		return nil, errors.Join(fmt.Errorf("opening CUDA device %d: %w", cfg.Device, err), d.Close())
	}
	return d, nil
}

// prepare takes the memory that every device needs, on the card's thread.
func (d *Device) prepare() (err error) {
	if d.host, err = newStaging(d.card); err != nil {
		return err
	}
	if d.params, err = newParams(d.card); err != nil || d.precision == F32 || d.plain {
		return err
	}
	if d.blas, err = d.card.OpenBLAS(); errors.Is(err, driver.ErrNoBLAS) {
		return nil // bf16 products then take the plain kernel; Name says so
	}
	return err
}

// Name implements [cuda.Device].
func (d *Device) Name() string {
	kind := d.precision.String()
	switch {
	case d.blas != nil:
		kind += fmt.Sprintf(" sm_%d%d cublaslt", d.card.Major, d.card.Minor)
	case d.precision == BF16 && d.plain:
		kind += " plain"
	case d.precision == BF16:
		kind += fmt.Sprintf(" sm_%d%d without cublaslt", d.card.Major, d.card.Minor)
	}
	return fmt.Sprintf("cuda %s (%s, driver for CUDA %s)", kind, d.card.Name, d.card.Driver)
}

// Close implements [cuda.Device]. A second call does nothing.
func (d *Device) Close() (err error) {
	d.closed.Do(func() {
		err = d.card.Do(func() error {
			errs := []error{d.card.Wait(), d.host.close(), d.params.close(), d.shots.close(d.card), d.pinned.drop(d.card)}
			if d.blas != nil {
				errs = append(errs, d.blas.Close())
			}
			errs = append(errs, d.spare.drop(d.card))
			for _, r := range d.rooms {
				if r.at != 0 {
					errs = append(errs, d.card.Free(r.at))
				}
			}
			return errors.Join(errs...)
		})
		if errors.Is(err, errInUse) {
			return // the card stays open: what is given out is memory of its context
		}
		err = errors.Join(err, d.card.Close())
	})
	return err
}

// matrix is a row-major view of device memory.
type matrix struct {
	at                 driver.Ptr
	rows, cols, stride int // stride in values
}

// rowRange is the view of rows lo..hi-1.
func (d *Device) rowRange(m matrix, lo, hi int) matrix {
	m.at += driver.Ptr(lo * m.stride * d.width)
	m.rows = hi - lo
	return m
}

// owner is the buffer of operand t, which must lie in this card's memory. An
// empty view needs none.
func (d *Device) owner(op string, t cuda.Tensor) (*buffer, error) {
	if t.Rows == 0 || t.Cols == 0 {
		return nil, nil //nolint:nilnil // an empty view has no owner and is no error
	}
	b, ok := t.Buf.(*buffer)
	if !ok {
		return nil, fmt.Errorf("%s: %w: %s lies in a %T, not in this device's memory", op, cuda.ErrShape, t, t.Buf)
	}
	if b.d.card.Index != d.card.Index || b.d.width != d.width {
		return nil, fmt.Errorf("%s: %w: %s lies on %s, not on %s", op, cuda.ErrShape, t, b.d.Name(), d.Name())
	}
	if b.at.Load() == 0 {
		return nil, fmt.Errorf("%s: %w: %s lies in a closed buffer", op, cuda.ErrShape, t)
	}
	return b, nil
}

// views turns checked operands into matrices.
func (d *Device) views(op string, tensors ...cuda.Tensor) ([]matrix, error) {
	out := make([]matrix, len(tensors))
	for i, t := range tensors {
		out[i] = matrix{rows: t.Rows, cols: t.Cols, stride: t.Stride}
		b, err := d.owner(op, t)
		if err != nil {
			return nil, err
		}
		if b == nil {
			continue
		}
		if b.wide != 0 {
			return nil, fmt.Errorf("%s: %w: %s is a state of the delta rule, kept in float32; download it instead", op, cuda.ErrShape, t)
		}
		out[i].at = driver.Ptr(b.at.Load()) + driver.Ptr(t.Off*d.width)
	}
	return out, nil
}

// launch starts a kernel of file. A name ending in _ gets the precision's.
func (d *Device) launch(file, name string, g driver.Grid, args ...any) error {
	k := d.kernels[name]
	if k == nil {
		var err error
		if k, err = d.kernel(file, name); err != nil {
			return err
		}
		d.kernels[name] = k
	}
	return d.card.Launch(k, g, args...)
}

// kernel loads a kernel of file.
func (d *Device) kernel(file, name string) (*driver.Kernel, error) {
	image, err := kernels.PTX(file)
	if err != nil {
		return nil, err
	}
	module, err := d.card.Module(file, image)
	if err != nil {
		return nil, err
	}
	if strings.HasSuffix(name, "_") {
		name += d.precision.String()
	}
	return module.Kernel(name)
}

// spread is a grid of 256 threads for n values, each thread taking several
// where there are very many.
func (d *Device) spread(n int) driver.Grid {
	return driver.Grid{Blocks: [3]int{min((n+255)/256, d.card.SMs*16)}, Threads: [3]int{256}}
}
