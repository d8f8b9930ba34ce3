// dst = act(gate) * x, a thread a value: see gpu/gatemul.go. dst may be either
// operand.
#include "element.cuh"

template <typename T>
__device__ void gatemul(Matrix<T> dst, Matrix<const T> gate, Matrix<const T> x, long long rows, int cols, int silu) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < rows * cols; i += step) {
    const long long r = i / cols, c = i % cols;
    const float g = load(gate.row(r) + c), v = load(x.row(r) + c);
    const float act = (silu ? g : 1) / (1 + expf(-g));
    store(dst.row(r) + c, act * v);
  }
}

#define GATEMUL(name, T)                                                                                              \
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      name(T *dst, long long dst_stride, const T *gate, long long gate_stride, const T *x, long long x_stride,        \
           long long rows, int cols, int silu) {                                                                      \
    gatemul<T>({dst, dst_stride}, {gate, gate_stride}, {x, x_stride}, rows, cols, silu);                              \
  }

GATEMUL(gatemul_f32, float)
GATEMUL(gatemul_bf16, bf16)
