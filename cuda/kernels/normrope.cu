// RMSNorm and then RoPE of every head, a block a row and a warp a head at a
// time: see gpu/normrope.go. What is between the two is not rounded. dst may
// be x. Squares are summed in double, as in rmsnorm.cu, and angles taken in
// double, as in rope.cu.
#include "element.cuh"

template <typename T>
__device__ void normrope(Matrix<T> dst, Matrix<const T> x, long long step, const T *w, const int *pos, const double *freq, int heads,
                         int dim, int half, float eps, float gain) {
  extern __shared__ float table[]; // half cosines, half sines, then a head a warp
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  float *head = table + 2 * half + warp * dim;
  const double at = pos[blockIdx.x];
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    double s, c;
    sincos(at * freq[i], &s, &c);
    table[i] = (float)c;
    table[half + i] = (float)s;
  }
  __syncthreads();
  for (int h = warp; h < heads; h += warps) {
    const T *in = x.row(blockIdx.x) + h * step;
    T *out = dst.row(blockIdx.x) + (long long)h * dim;
    double squares = 0;
    for (int j = lane; j < dim; j += 32) {
      const float v = load(in + j);
      head[j] = v;
      squares += (double)v * v;
    }
    for (int d = 16; d > 0; d /= 2)
      squares += __shfl_xor_sync(~0u, squares, d);
    const float inv = (float)(1 / sqrt(squares / dim + (double)eps));
    __syncwarp();
    for (int i = lane; i < half; i += 32) {
      const float c = table[i], s = table[half + i];
      const float u = head[i] * inv * (gain + load(w + i)), v = head[half + i] * inv * (gain + load(w + half + i));
      store(out + i, __fsub_rn(__fmul_rn(u, c), __fmul_rn(v, s)));
      store(out + half + i, __fadd_rn(__fmul_rn(v, c), __fmul_rn(u, s)));
    }
    for (int j = 2 * half + lane; j < dim; j += 32)
      store(out + j, head[j] * inv * (gain + load(w + j)));
    __syncwarp();
  }
}

#define NORMROPE(name, T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      name(T *dst, long long dst_stride, const T *x, long long x_stride, long long step, const T *w, const int *pos,  \
           const double *freq, int heads, int dim, int half, float eps, float gain) {                                 \
    normrope<T>({dst, dst_stride}, {x, x_stride}, step, w, pos, freq, heads, dim, half, eps, gain);                   \
  }

NORMROPE(normrope_f32, float)
NORMROPE(normrope_bf16, bf16)
