// RMSNorm and then RoPE of every head, a block a row and a warp a head at a
// time: see gpu/normrope.go. What is between the two is not rounded. dst may
// be x. Squares are summed in double, as in rmsnorm.cu; angles are taken in
// double (positions reach 3e5) and rounded only as cosine and sine.
#include "element.cuh"

// Pairs of neighbouring values, in one piece where they lie so. Which of the
// two changes no bit: a lane sums the same values.
__device__ inline float2 load2(const float *p, int n, bool whole) {
  return whole ? *(const float2 *)p : make_float2(p[0], n > 1 ? p[1] : 0);
}
__device__ inline float2 load2(const bf16 *p, int n, bool whole) {
  return whole ? __bfloat1622float2(*(const __nv_bfloat162 *)p) : make_float2(load(p), n > 1 ? load(p + 1) : 0);
}
__device__ inline void store2(float *p, float2 v) { *(float2 *)p = v; }
__device__ inline void store2(bf16 *p, float2 v) { *(__nv_bfloat162 *)p = __floats2bfloat162_rn(v.x, v.y); }

template <typename T> __device__ inline bool on2(const T *p) { return (unsigned long long)p % (2 * sizeof(T)) == 0; }

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
    const bool whole = on2(in) && on2(out) && on2(w) && dim % 2 == 0;
    double squares = 0;
    for (int j = 2 * lane; j < dim; j += 64) {
      const float2 v = load2(in + j, dim - j, whole);
      head[j] = v.x;
      if (j + 1 < dim)
        head[j + 1] = v.y;
      squares += (double)v.x * v.x + (double)v.y * v.y;
    }
    for (int d = 16; d > 0; d /= 2)
      squares += __shfl_xor_sync(~0u, squares, d);
    const float inv = (float)(1 / sqrt(squares / dim + (double)eps));
    __syncwarp();
    auto normed = [&](int j, float weight) { return head[j] * inv * (gain + weight); };
    auto low = [&](float u, float v, int i) { return __fsub_rn(__fmul_rn(u, table[i]), __fmul_rn(v, table[half + i])); };
    auto high = [&](float u, float v, int i) { return __fadd_rn(__fmul_rn(v, table[i]), __fmul_rn(u, table[half + i])); };
    if (whole && half % 2 == 0) {
      for (int i = 2 * lane; i < half; i += 64) {
        const float2 g = load2(w + i, 2, true), k = load2(w + half + i, 2, true);
        const float u = normed(i, g.x), v = normed(half + i, k.x), u1 = normed(i + 1, g.y), v1 = normed(half + i + 1, k.y);
        store2(out + i, make_float2(low(u, v, i), low(u1, v1, i + 1)));
        store2(out + half + i, make_float2(high(u, v, i), high(u1, v1, i + 1)));
      }
      for (int j = 2 * half + 2 * lane; j < dim; j += 64) {
        const float2 g = load2(w + j, 2, true);
        store2(out + j, make_float2(normed(j, g.x), normed(j + 1, g.y)));
      }
    } else {
      for (int i = lane; i < half; i += 32) {
        const float u = normed(i, load(w + i)), v = normed(half + i, load(w + half + i));
        store(out + i, low(u, v, i));
        store(out + half + i, high(u, v, i));
      }
      for (int j = 2 * half + lane; j < dim; j += 32)
        store(out + j, normed(j, load(w + j)));
    }
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
