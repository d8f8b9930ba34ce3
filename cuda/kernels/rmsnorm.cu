// dst = x / sqrt(mean(x^2) + eps) * (gain + w), a block a row: see
// gpu/rmsnorm.go. Squares are summed in double, since a row may hold 1e18.
// dst may be x.
#include "eight.cuh"

template <typename T>
__device__ void rmsnorm(Matrix<T> dst, Matrix<const T> x, const T *w, int cols, float eps, float gain) {
  __shared__ double room[32];
  const T *in = x.row(blockIdx.x);
  T *out = dst.row(blockIdx.x);
  const bool whole = on16(in, cols) && on16(out, cols) && on16(w, cols);
  const int chunks = (cols + 7) / 8;
  double squares = 0;
  for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
    const Eight e = load8(in, c, cols, whole);
#pragma unroll
    for (int i = 0; i < 8; i++)
      squares += (double)e.v[i] * e.v[i];
  }
  squares = block_sum(squares, room);
  const float inv = (float)(1 / sqrt(squares / cols + (double)eps));
  for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
    Eight e = load8(in, c, cols, whole);
    const Eight g = load8(w, c, cols, whole);
#pragma unroll
    for (int i = 0; i < 8; i++)
      e.v[i] = e.v[i] * inv * (gain + g.v[i]);
    store8(out, c, cols, whole, e);
  }
}

#define RMSNORM(name, T)                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) name(T *dst, long long dst_stride, const T *x, long long x_stride, \
                                                         const T *w, int cols, float eps, float gain) {               \
    rmsnorm<T>({dst, dst_stride}, {x, x_stride}, w, cols, eps, gain);                                                 \
  }

RMSNORM(rmsnorm_f32, float)
RMSNORM(rmsnorm_bf16, bf16)
