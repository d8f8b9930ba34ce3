// Dot product, squares, distance and equality of two rows, a block a row: see
// gpu/similarity.go. Every thread has the same values wherever the rows lie, so
// that sums do not depend on it: 16 bytes of a row, then as many 256 such
// pieces further.
#include "element.cuh"

struct Similarity {
  double dot, a, b, diff, most, equal;
};

// The largest of v over the block's threads, NaN if there is one.
__device__ inline double block_most(double v, double *room) {
  const auto more = [](double w, double v) { return w > v || w != w; };
  for (int d = 16; d > 0; d /= 2) {
    const double w = __shfl_xor_sync(~0u, v, d);
    v = more(w, v) ? w : v;
  }
  if (threadIdx.x % 32 == 0)
    room[threadIdx.x / 32] = v;
  __syncthreads();
  for (int i = 0; i < blockDim.x / 32; i++)
    v = more(room[i], v) ? room[i] : v;
  __syncthreads();
  return v;
}

template <typename T> struct __align__(16) Piece {
  static constexpr int N = 16 / sizeof(T);
  T v[N];
};

template <typename T>
__device__ void similarity(Matrix<const T> a, Matrix<const T> b, int cols, bool whole, Similarity *out) {
  __shared__ double room[32];
  constexpr int N = Piece<T>::N;
  const T *x = a.row(blockIdx.x), *y = b.row(blockIdx.x);
  double dot = 0, xx = 0, yy = 0, diff = 0, most = 0;
  bool equal = true;
  const auto add = [&](float p, float q) {
    const double u = p, v = q, d = fabs(u - v);
    dot += u * v;
    xx += u * u;
    yy += v * v;
    diff += d * d;
    most = d > most || d != d ? d : most;
    equal = equal && __float_as_int(p) == __float_as_int(q);
  };
  for (int j = threadIdx.x * N; j < cols; j += blockDim.x * N) {
    if (whole && j + N <= cols) {
      const Piece<T> p = *(const Piece<T> *)(x + j), q = *(const Piece<T> *)(y + j);
#pragma unroll
      for (int e = 0; e < N; e++)
        add(load(p.v + e), load(q.v + e));
    } else {
      for (int e = 0; e < N && j + e < cols; e++)
        add(load(x + j + e), load(y + j + e));
    }
  }
  dot = block_sum(dot, room);
  xx = block_sum(xx, room);
  yy = block_sum(yy, room);
  diff = block_sum(diff, room);
  most = block_most(most, room);
  equal = __syncthreads_and(equal);
  if (threadIdx.x == 0)
    out[blockIdx.x] = {dot, xx, yy, diff, most, equal ? 1. : 0.};
}

// whole says that pieces of 16 bytes are aligned in both.
#define SIMILARITY(name, T)                                                                                           \
  extern "C" __global__ void __launch_bounds__(256) name(const T *a, long long a_stride, const T *b,                  \
                                                         long long b_stride, int cols, int whole, Similarity *out) {  \
    similarity<T>({a, a_stride}, {b, b_stride}, cols, whole, out);                                                    \
  }

SIMILARITY(similarity_f32, float)
SIMILARITY(similarity_bf16, bf16)
