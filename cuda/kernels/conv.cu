// The causal depthwise convolution with SiLU: see gpu/conv.go.
#include "element.cuh"

// Row t of the rows that begin with the history.
template <typename T>
__device__ const T *source(Matrix<T> history, Matrix<const T> x, int past, long long t) {
  return t < past ? history.row(t) : x.row(t - past);
}

// x·sigmoid(x). What is rounded to bf16 needs no exact quotient.
__device__ inline float silu(float x, const float *) { return x / (1 + expf(-x)); }
__device__ inline float silu(float x, const bf16 *) { return __fdividef(x, 1 + __expf(-x)); }

// A thread a value; tap taps-1 multiplies the present row.
template <typename T>
__device__ void conv(Matrix<T> dst, Matrix<const T> x, Matrix<const T> w, Matrix<T> history, long long rows, int cols,
                     int taps) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < rows * cols; i += step) {
    const long long t = i / cols, c = i % cols;
    float sum = 0;
    for (int j = 0; j < taps; j++)
      sum = fmaf(load(w.row(c) + j), load(source(history, x, taps - 1, t + j) + c), sum);
    store(dst.row(t) + c, silu(sum, dst.data));
  }
}

// The same for 4 taps, with the same bits, where all rows begin on 16 bytes and
// cols fills whole pieces of 16 bytes: a thread has a piece of STRIP rows, so that
// every row is read little more than once.
constexpr int STRIP = 16;
template <typename T>
__device__ void conv_pieces(Matrix<T> dst, Matrix<const T> x, Matrix<const T> w, Matrix<T> history, long long rows,
                            int cols) {
  constexpr int WIDE = 16 / sizeof(T), AHEAD = 4;
  union Piece {
    uint4 all;
    T one[WIDE];
  };
  const int pieces = cols / WIDE;
  const long long n = (long long)blockIdx.x * blockDim.x + threadIdx.x, t0 = n / pieces * STRIP;
  const int c = n % pieces * WIDE;
  if (t0 >= rows)
    return;
  float taps[4][WIDE], seen[3][WIDE];
  Piece p[AHEAD];
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int i = 0; i < WIDE; i++)
      taps[j][i] = load(w.row(c + i) + j);
#pragma unroll
  for (int j = 0; j < 3; j++) {
    p[0].all = *(const uint4 *)(source(history, x, 3, t0 + j) + c);
#pragma unroll
    for (int i = 0; i < WIDE; i++)
      seen[j][i] = load(p[0].one + i);
  }
  for (long long t = t0; t < t0 + STRIP && t < rows; t += AHEAD) {
#pragma unroll
    for (int k = 0; k < AHEAD; k++)
      if (t + k < rows)
        p[k].all = *(const uint4 *)(x.row(t + k) + c);
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      if (t + k >= rows)
        break;
#pragma unroll
      for (int i = 0; i < WIDE; i++) {
        const float now = load(p[k].one + i);
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 3; j++)
          sum = fmaf(taps[j][i], seen[j][i], sum);
        sum = fmaf(taps[3][i], now, sum);
        seen[0][i] = seen[1][i], seen[1][i] = seen[2][i], seen[2][i] = now;
        store(p[k].one + i, silu(sum, dst.data));
      }
      *(uint4 *)(dst.row(t + k) + c) = p[k].all;
    }
  }
}

// The last taps-1 rows become the history, a thread a column: in ascending
// order, each old row is read before it is overwritten.
template <typename T> __device__ void remember(Matrix<T> history, Matrix<const T> x, long long rows, int cols, int past) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= cols)
    return;
  for (int i = 0; i < past; i++)
    history.row(i)[c] = source(history, x, past, rows + i)[c];
}

#define CONV(T, suffix)                                                                                               \
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      conv_##suffix(T *dst, long long dst_stride, const T *x, long long x_stride, const T *w, long long w_stride,     \
                    T *history, long long history_stride, long long rows, int cols, int taps) {                       \
    conv<T>({dst, dst_stride}, {x, x_stride}, {w, w_stride}, {history, history_stride}, rows, cols, taps);            \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(128)                                                                   \
      conv_pieces_##suffix(T *dst, long long dst_stride, const T *x, long long x_stride, const T *w, long long w_stride, \
                           T *history, long long history_stride, long long rows, int cols, int) {                     \
    conv_pieces<T>({dst, dst_stride}, {x, x_stride}, {w, w_stride}, {history, history_stride}, rows, cols);           \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      remember_##suffix(T *history, long long history_stride, const T *x, long long x_stride, long long rows,         \
                        int cols, int past) {                                                                         \
    remember<T>({history, history_stride}, {x, x_stride}, rows, cols, past);                                          \
  }

CONV(float, f32)
CONV(bf16, bf16)
