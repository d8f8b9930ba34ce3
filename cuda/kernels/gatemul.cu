// dst = act(gate) * x, a thread eight values: see gpu/gatemul.go. dst may be
// either operand.
#include "eight.cuh"

// What 1 + e^-x divides: in bf16, quick forms that are right to 2^-20 serve.
__device__ inline float divided(float v, float x, float) { return v / (1 + expf(-x)); }
__device__ inline float divided(float v, float x, bf16) { return __fdividef(v, 1 + __expf(-x)); }

template <typename T>
__device__ void gatemul(Matrix<T> dst, Matrix<const T> gate, Matrix<const T> x, int rows, int cols, int silu) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (8 * c >= cols)
    return;
  for (int r = blockIdx.y; r < rows; r += gridDim.y) {
    const bool whole = on16(dst.row(r), cols) && on16(gate.row(r), cols) && on16(x.row(r), cols);
    Eight e = load8(x.row(r), c, cols, whole);
    const Eight g = load8(gate.row(r), c, cols, whole);
#pragma unroll
    for (int i = 0; i < 8; i++)
      e.v[i] *= divided(silu ? g.v[i] : 1, g.v[i], T());
    store8(dst.row(r), c, cols, whole, e);
  }
}

#define GATEMUL(name, T)                                                                                              \
  extern "C" __global__ void __launch_bounds__(128)                                                                   \
      name(T *dst, long long dst_stride, const T *gate, long long gate_stride, const T *x, long long x_stride,        \
           int rows, int cols, int silu) {                                                                            \
    gatemul<T>({dst, dst_stride}, {gate, gate_stride}, {x, x_stride}, rows, cols, silu);                              \
  }

GATEMUL(gatemul_f32, float)
GATEMUL(gatemul_bf16, bf16)
