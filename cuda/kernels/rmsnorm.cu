// dst = x / sqrt(mean(x^2) + eps) * (gain + w), a block a row: see
// gpu/rmsnorm.go. Squares are summed in double, since a row may hold 1e18.
#include "element.cuh"

template <typename T>
__device__ void rmsnorm(Matrix<T> dst, Matrix<const T> x, const T *w, int cols, float eps, float gain) {
  __shared__ double room[32];
  const T *in = x.row(blockIdx.x);
  T *out = dst.row(blockIdx.x);
  double squares = 0;
  for (int j = threadIdx.x; j < cols; j += blockDim.x) {
    double v = load(in + j);
    squares += v * v;
  }
  squares = block_sum(squares, room);
  const float inv = (float)(1 / sqrt(squares / cols + (double)eps));
  for (int j = threadIdx.x; j < cols; j += blockDim.x)
    store(out + j, load(in + j) * inv * (gain + load(w + j)));
}

#define RMSNORM(name, T)                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) name(T *dst, long long dst_stride, const T *x, long long x_stride, \
                                                         const T *w, int cols, float eps, float gain) {               \
    rmsnorm<T>({dst, dst_stride}, {x, x_stride}, w, cols, eps, gain);                                                 \
  }

RMSNORM(rmsnorm_f32, float)
RMSNORM(rmsnorm_bf16, bf16)
