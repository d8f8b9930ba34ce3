// dst's rows = src's, and 0 from column cols to wide: bf16 operands whose rows
// do not begin on 16 bytes, laid out so that they do. See gpu/product.go.
#include "element.cuh"

extern "C" __global__ void __launch_bounds__(256)
    pack(bf16 *dst, long long dst_stride, const bf16 *src, long long src_stride, long long rows, int cols, int wide) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < rows * wide; i += step) {
    const long long r = i / wide, c = i % wide;
    dst[r * dst_stride + c] = c < cols ? src[r * src_stride + c] : __float2bfloat16(0);
  }
}
