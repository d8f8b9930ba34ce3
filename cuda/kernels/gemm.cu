// dst[M,N] = a[M,K] w[N,K]^T, or that added to dst: see gpu/gemm.go.
//
// Every value is one chain of fused multiply-adds over k = 0, 1, ..., K-1 in
// one thread, whatever the tile: neither the number of rows, nor where they
// lie, nor the shape of the tiles changes a bit. The two tile sizes therefore
// agree, and serve many rows (128 x 128) and few (32 x 32). The logits of bf16
// operands stay float.
#include "element.cuh"

// ROWS x COLS values a block, each thread R x C of them, DEPTH of k at a time.
template <typename T, typename D, int ROWS, int COLS, int DEPTH, int R, int C>
__device__ void gemm(Matrix<D> dst, Matrix<const T> a, Matrix<const T> w, int m, int n, int k, int add) {
  constexpr int ACROSS = COLS / C, THREADS = (ROWS / R) * ACROSS;
  constexpr int LOADS_A = ROWS * DEPTH / THREADS, LOADS_W = COLS * DEPTH / THREADS;
  // One float of padding a row of k keeps the transposing stores apart.
  __shared__ float as[2][DEPTH][ROWS + 4], ws[2][DEPTH][COLS + 4];
  const int tx = threadIdx.x % ACROSS, ty = threadIdx.x / ACROSS;
  const long long row0 = (long long)blockIdx.x * ROWS, col0 = (long long)blockIdx.y * COLS;
  float sum[R][C] = {}, next_a[LOADS_A], next_w[LOADS_W];

  auto fetch = [&](int k0) {
#pragma unroll
    for (int i = 0; i < LOADS_A; i++) {
      int at = threadIdx.x + i * THREADS, r = at / DEPTH, c = k0 + at % DEPTH;
      next_a[i] = row0 + r < m && c < k ? load(a.row(row0 + r) + c) : 0;
    }
#pragma unroll
    for (int i = 0; i < LOADS_W; i++) {
      int at = threadIdx.x + i * THREADS, r = at / DEPTH, c = k0 + at % DEPTH;
      next_w[i] = col0 + r < n && c < k ? load(w.row(col0 + r) + c) : 0;
    }
  };
  auto keep = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < LOADS_A; i++) {
      int at = threadIdx.x + i * THREADS;
      as[buffer][at % DEPTH][at / DEPTH] = next_a[i];
    }
#pragma unroll
    for (int i = 0; i < LOADS_W; i++) {
      int at = threadIdx.x + i * THREADS;
      ws[buffer][at % DEPTH][at / DEPTH] = next_w[i];
    }
  };

  fetch(0);
  keep(0);
  __syncthreads();
  int buffer = 0;
  for (int k0 = 0; k0 < k; k0 += DEPTH) {
    const bool more = k0 + DEPTH < k;
    if (more)
      fetch(k0 + DEPTH);
    auto step = [&](int kk) {
      float x[R], y[C];
#pragma unroll
      for (int i = 0; i < R; i++)
        x[i] = as[buffer][kk][ty * R + i];
#pragma unroll
      for (int j = 0; j < C; j++)
        y[j] = ws[buffer][kk][tx + j * ACROSS];
#pragma unroll
      for (int i = 0; i < R; i++)
#pragma unroll
        for (int j = 0; j < C; j++)
          sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
    };
    if (k - k0 >= DEPTH) {
#pragma unroll
      for (int kk = 0; kk < DEPTH; kk++)
        step(kk);
    } else {
      // The last tile stops at K: its padding times Inf would be NaN.
      for (int kk = 0; kk < k - k0; kk++)
        step(kk);
    }
    if (more)
      keep(buffer ^ 1);
    __syncthreads();
    buffer ^= 1;
  }
#pragma unroll
  for (int i = 0; i < R; i++) {
    const long long r = row0 + ty * R + i;
    if (r >= m)
      break;
#pragma unroll
    for (int j = 0; j < C; j++) {
      const long long c = col0 + tx + j * ACROSS;
      if (c < n) {
        D *to = dst.row(r) + c;
        store(to, add ? load(to) + sum[i][j] : sum[i][j]);
      }
    }
  }
}

#define GEMM(name, T, D, ROWS, COLS, DEPTH, R, C, BLOCKS)                                                             \
  extern "C" __global__ void __launch_bounds__((ROWS / R) * (COLS / C), BLOCKS)                                       \
      name(D *dst, long long dst_stride, const T *a, long long a_stride, const T *w, long long w_stride, int m,       \
           int n, int k, int add) {                                                                                   \
    gemm<T, D, ROWS, COLS, DEPTH, R, C>({dst, dst_stride}, {a, a_stride}, {w, w_stride}, m, n, k, add);               \
  }

GEMM(gemm_many_f32, float, float, 128, 128, 8, 8, 8, 2)
GEMM(gemm_few_f32, float, float, 32, 32, 16, 2, 2, 4)
GEMM(gemm_many_bf16, bf16, bf16, 128, 128, 8, 8, 8, 2)
GEMM(gemm_few_bf16, bf16, bf16, 32, 32, 16, 2, 2, 4)
GEMM(logits_many_bf16, bf16, float, 128, 128, 8, 8, 8, 2)
GEMM(logits_few_bf16, bf16, float, 32, 32, 16, 2, 2, 4)
