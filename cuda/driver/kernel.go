//go:build cuda && cgo

package driver

/*
#include <cuda.h>

// Launches fn with n arguments: argument i lies offsets[i] bytes into data.
static CUresult launch(CUfunction fn, const unsigned int *grid, const unsigned int *block, unsigned int shared,
                       CUstream stream, char *data, const unsigned int *offsets, int n) {
  void *params[64];
  for (int i = 0; i < n; i++)
    params[i] = data + offsets[i];
  return cuLaunchKernel(fn, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared, stream, params, 0);
}

// Loads image (ending in a zero byte) and keeps the compiler's complaint.
static CUresult complain(const void *image, char *log, size_t size) {
  CUmodule module;
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void *values[] = {log, (void *)size};
  CUresult r = cuModuleLoadDataEx(&module, image, 2, options, values);
  if (r == CUDA_SUCCESS)
    cuModuleUnload(module);
  return r;
}
*/
import "C"

import (
	"fmt"
	"math"
	"strings"
	"unsafe"

	"gorgonia.org/cu"
)

// maxArgs is the size of params in launch above.
const maxArgs = 64

// Module is compiled code on the card.
type Module struct {
	name    string
	module  cu.Module
	kernels map[string]*Kernel
}

// Module loads a PTX or cubin image once; later calls return the same module.
// On the thread.
func (c *Card) Module(name string, image []byte) (*Module, error) {
	if m, ok := c.modules[name]; ok {
		return m, nil
	}
	loaded, err := cu.LoadData(string(image))
	if err != nil {
		log := make([]byte, 4096)
		text := append(append([]byte{}, image...), 0)
		code := C.complain(unsafe.Pointer(&text[0]), (*C.char)(unsafe.Pointer(&log[0])), C.size_t(len(log)))
		said := strings.Join(strings.Fields(strings.TrimRight(string(log), "\x00")), " ")
		return nil, fmt.Errorf("loading kernels %s for %s, driver %s: %w (%s)", name, c.Name, c.Driver, failed(code, "compiling"), said)
	}
	m := &Module{name: name, module: loaded, kernels: map[string]*Kernel{}}
	c.modules[name] = m
	return m, nil
}

func (m *Module) unload() error {
	if err := m.module.Unload(); err != nil {
		return fmt.Errorf("unloading kernels %s: %w", m.name, err)
	}
	return nil
}

// Kernel is a function that blocks of threads run.
type Kernel struct {
	name   string
	fn     cu.Function
	shared int // what one block may ask for, at present
}

// Kernel finds a function by its name, on the thread.
func (m *Module) Kernel(name string) (*Kernel, error) {
	if k, ok := m.kernels[name]; ok {
		return k, nil
	}
	fn, err := m.module.Function(name)
	if err != nil {
		return nil, fmt.Errorf("finding kernel %s in %s: %w", name, m.name, err)
	}
	k := &Kernel{name: name, fn: fn, shared: 48 << 10}
	m.kernels[name] = k
	return k, nil
}

func (k *Kernel) c() C.CUfunction { return *(*C.CUfunction)(unsafe.Pointer(&k.fn)) }

// Grid says how many blocks, of how many threads, with how much dynamic shared
// memory. Dimensions left 0 are 1.
type Grid struct {
	Blocks, Threads [3]int
	Shared          int // bytes a block
}

// Launch starts k in the stream's order, on the thread. An argument is a Ptr,
// an int, int32, int64, float32 or float64 in the parameter's own width or a
// wider one, or []byte for a structure passed by value.
func (c *Card) Launch(k *Kernel, g Grid, args ...any) error {
	if len(args) > maxArgs {
		return fmt.Errorf("launching %s: %d arguments, at most %d", k.name, len(args), maxArgs)
	}
	if g.Shared > k.shared {
		if g.Shared > c.MaxShared {
			return fmt.Errorf("launching %s: a block needs %d bytes of shared memory, %s has %d; use --backend cpu for this shape", k.name, g.Shared, c.Name, c.MaxShared)
		}
		if err := failed(C.cuFuncSetAttribute(k.c(), C.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, C.int(g.Shared)), "preparing %s", k.name); err != nil {
			return err
		}
		k.shared = g.Shared
	}
	data, offsets, err := pack(k.name, args, c.data[:0], c.offsets[:0])
	if err != nil {
		return err
	}
	c.data, c.offsets = data, offsets
	if len(c.recent) == 8 {
		c.recent = append(c.recent[:0], c.recent[1:]...)
	}
	c.recent = append(c.recent, k.name)
	grid, block := dims(g.Blocks), dims(g.Threads)
	return failed(C.launch(k.c(), &grid[0], &block[0], C.uint(g.Shared), c.c(), (*C.char)(unsafe.Pointer(unsafe.SliceData(data))),
		unsafe.SliceData(offsets), C.int(len(args))), "launching %s, %v blocks of %v threads", k.name, g.Blocks, g.Threads)
}

func dims(d [3]int) (out [3]C.uint) {
	for i, n := range d {
		out[i] = C.uint(max(n, 1))
	}
	return out
}

// pack lays arguments out, each on a 64-byte boundary (the widest that a
// parameter asks for). Numbers are little-endian, so that a narrower
// parameter reads the low bytes of a wider value. It appends to data and
// offsets.
func pack(kernel string, args []any, data []uint64, offsets []C.uint) ([]uint64, []C.uint, error) {
	const words = 64 / 8
	for i, a := range args {
		offsets = append(offsets, C.uint(len(data)*8))
		var slot [words]uint64
		switch v := a.(type) {
		case Ptr:
			slot[0] = uint64(v)
		case int:
			slot[0] = uint64(v)
		case int32:
			slot[0] = uint64(v)
		case int64:
			slot[0] = uint64(v)
		case float32:
			slot[0] = uint64(math.Float32bits(v))
		case float64:
			slot[0] = math.Float64bits(v)
		case []byte:
			n := (len(v) + 63) / 64 * words
			at := len(data)
			data = append(data, make([]uint64, n)...)
			copy(unsafe.Slice((*byte)(unsafe.Pointer(&data[at])), len(v)), v)
			continue
		default:
			return nil, nil, fmt.Errorf("launching %s: argument %d is a %T", kernel, i, a)
		}
		data = append(data, slot[:]...)
	}
	return data, offsets, nil
}
