// dst[rows[i]] = src[i], a block for each row of src: see gpu/scatter.go. Where
// rows of both begin on 16 bytes and hold a multiple of them, wide is set.
#include "element.cuh"

template <typename T>
__device__ void scatter(T *dst, long long dst_stride, const T *src, long long src_stride, const int *rows, int cols, int wide) {
  T *to = dst + rows[blockIdx.x] * dst_stride;
  const T *from = src + blockIdx.x * src_stride;
  if (wide) {
    for (int c = threadIdx.x; c < cols * (int)sizeof(T) / 16; c += blockDim.x)
      ((uint4 *)to)[c] = ((const uint4 *)from)[c];
    return;
  }
  for (int c = threadIdx.x; c < cols; c += blockDim.x)
    to[c] = from[c];
}

#define SCATTER(name, T)                                                                                              \
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      name(T *dst, long long dst_stride, const T *src, long long src_stride, const int *rows, int cols, int wide) {   \
    scatter(dst, dst_stride, src, src_stride, rows, cols, wide);                                                      \
  }

SCATTER(scatter_f32, float)
SCATTER(scatter_bf16, bf16)
