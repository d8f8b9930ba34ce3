// Rotates the first rotary dims of every head, a block a row: see gpu/rope.go.
// Angles are taken in double (positions reach 3e5) and rounded only as cosine
// and sine.
#include "element.cuh"

template <typename T>
__device__ void rope(Matrix<T> x, const int *pos, const double *freq, int heads, int dim, int half) {
  extern __shared__ float table[]; // half cosines, half sines
  const double at = pos[blockIdx.x];
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    double s, c;
    sincos(at * freq[i], &s, &c);
    table[i] = (float)c;
    table[half + i] = (float)s;
  }
  __syncthreads();
  T *row = x.row(blockIdx.x);
  for (int i = threadIdx.x; i < heads * half; i += blockDim.x) {
    T *a = row + (long long)(i / half) * dim + i % half;
    const float c = table[i % half], s = table[half + i % half];
    const float u = load(a), v = load(a + half);
    store(a, __fsub_rn(__fmul_rn(u, c), __fmul_rn(v, s)));
    store(a + half, __fadd_rn(__fmul_rn(v, c), __fmul_rn(u, s)));
  }
}

#define ROPE(name, T)                                                                                                 \
  extern "C" __global__ void __launch_bounds__(256) name(T *x, long long stride, const int *pos, const double *freq,   \
                                                         int heads, int dim, int half) {                              \
    rope<T>({x, stride}, pos, freq, heads, dim, half);                                                                \
  }

ROPE(rope_f32, float)
ROPE(rope_bf16, bf16)
