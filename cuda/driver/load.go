//go:build cuda && cgo

package driver

/*
#cgo CFLAGS: -I${SRCDIR}/compat
#cgo LDFLAGS: -L${SRCDIR}/compat -ldl -lpthread

#include <cuda.h>

int draftscope_load(const char **why);
*/
import "C"

import (
	"fmt"

	"github.com/draftscope/draftscope/cuda"
	"gorgonia.org/cu"
)

// What a card and its driver must have.
const (
	// MinDriver is the oldest driver, as CUDA counts versions: the embedded
	// PTX is that of CUDA 13.0.
	MinDriver = 13000
	// MinMajor is the lowest compute capability: Ampere, for bf16 and
	// asynchronous copies.
	MinMajor = 8
)

// load starts the driver, once for the process.
func load() error {
	var why *C.char
	code := C.draftscope_load(&why)
	if s := C.GoString(why); s != "" {
		return fmt.Errorf("%w: no NVIDIA driver (%s); install one, or use --backend cpu", cuda.ErrUnavailable, s)
	}
	switch err := failed(C.CUresult(code), "starting the NVIDIA driver"); {
	case err == nil:
	case code == C.CUDA_ERROR_NO_DEVICE:
		return fmt.Errorf("%w: no CUDA device; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --backend cpu", cuda.ErrUnavailable)
	default:
		return fmt.Errorf("%w: %w; check nvidia-smi, restart after a driver update, or use --backend cpu", cuda.ErrUnavailable, err)
	}
	if v := cu.Version(); v < MinDriver {
		return fmt.Errorf("%w: the NVIDIA driver runs CUDA %s, this program needs %s; update the driver, or use --backend cpu",
			cuda.ErrUnavailable, versionString(v), versionString(MinDriver))
	}
	return nil
}

// versionString is 13000 as "13.0".
func versionString(v int) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }
