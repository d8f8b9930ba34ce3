// The causal depthwise convolution with SiLU: see gpu/conv.go.
#include "element.cuh"

// Row t of the rows that begin with the history.
template <typename T>
__device__ const T *source(Matrix<T> history, Matrix<const T> x, int past, long long t) {
  return t < past ? history.row(t) : x.row(t - past);
}

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
    store(dst.row(t) + c, sum / (1 + expf(-sum)));
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
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      remember_##suffix(T *history, long long history_stride, const T *x, long long x_stride, long long rows,         \
                        int cols, int past) {                                                                         \
    remember<T>({history, history_stride}, {x, x_stride}, rows, cols, past);                                          \
  }

CONV(float, f32)
CONV(bf16, bf16)
