//go:build cuda && cgo

package driver

/*
#include <cuda.h>
#include <string.h>

static CUresult encode(void *out, CUdeviceptr at, cuuint64_t rows, cuuint64_t cols, cuuint64_t stride, cuuint32_t tall) {
  CUtensorMap map;
  cuuint64_t dims[2] = {cols, rows}, strides[1] = {stride * 2};
  cuuint32_t box[2] = {64, tall}, steps[2] = {1, 1};
  CUresult r = cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)at, dims, strides, box, steps,
                                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  memcpy(out, &map, sizeof map);
  return r;
}
*/
import "C"

import "unsafe"

// TensorMap describes a bf16 matrix to Hopper's copy engine, in boxes of tall
// x 64 values with the 128-byte swizzle, as the kernels named fast_* read it
// from device memory. Rows begin on 16 bytes.
func TensorMap(m Operand, tall int) ([]byte, error) {
	out := make([]byte, C.sizeof_CUtensorMap)
	err := failed(C.encode(unsafe.Pointer(&out[0]), C.CUdeviceptr(m.At), C.cuuint64_t(m.Rows), C.cuuint64_t(m.Cols), C.cuuint64_t(m.Stride), C.cuuint32_t(tall)),
		"describing a matrix of %d x %d", m.Rows, m.Cols)
	return out, err
}
