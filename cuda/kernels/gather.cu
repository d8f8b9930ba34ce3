// dst's row i = src's row rows[i], a block a row: see gpu/gather.go.
#include "element.cuh"

template <typename T> __device__ void gather(Matrix<T> dst, Matrix<const T> src, const int *rows, int cols) {
  constexpr int per = 16 / sizeof(T);
  const T *in = src.row(rows[blockIdx.x]);
  T *out = dst.row(blockIdx.x);
  if (((unsigned long long)in | (unsigned long long)out) % 16 == 0 && cols % per == 0) {
    for (int j = threadIdx.x; j < cols / per; j += blockDim.x)
      ((uint4 *)out)[j] = ((const uint4 *)in)[j];
    return;
  }
  for (int j = threadIdx.x; j < cols; j += blockDim.x)
    out[j] = in[j];
}

#define GATHER(name, T)                                                                                               \
  extern "C" __global__ void __launch_bounds__(256) name(T *dst, long long dst_stride, const T *src,                  \
                                                         long long src_stride, const int *rows, int cols) {           \
    gather<T>({dst, dst_stride}, {src, src_stride}, rows, cols);                                                      \
  }

GATHER(gather_f32, float)
GATHER(gather_bf16, bf16)
