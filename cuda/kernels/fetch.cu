// The rows that leave the device, densely and in the dtype that the host wants,
// and how many values of each are then NaN or Inf: a warp a row. See
// gpu/fetch.go; between bf16 and bf16 fast_pack does the same in larger pieces.
#include "element.cuh"

template <typename To, typename From> __device__ To as(const From *p) {
  To v;
  store(&v, load(p));
  return v;
}
template <> __device__ bf16 as<bf16, bf16>(const bf16 *p) { return *p; } // any NaN bit by bit

template <typename To, typename From>
__device__ void fetch(To *dst, unsigned *odd, const From *src, long long stride, long long rows, int cols) {
  const long long row = blockIdx.x * 8ll + threadIdx.x / 32;
  if (row >= rows)
    return;
  unsigned mine = 0;
  for (int c = threadIdx.x % 32; c < cols; c += 32) {
    const To v = as<To>(src + row * stride + c);
    dst[row * cols + c] = v;
    mine += (__float_as_uint(load(&v)) & 0x7f800000) == 0x7f800000;
  }
  for (int m = 16; m; m >>= 1)
    mine += __shfl_xor_sync(~0u, mine, m);
  if (threadIdx.x % 32 == 0)
    odd[row] = mine;
}

#define FETCH(name, To, From)                                                                                         \
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      name(To *dst, unsigned *odd, const From *src, long long stride, long long rows, int cols) {                     \
    fetch(dst, odd, src, stride, rows, cols);                                                                         \
  }

FETCH(fetch_f32_f32, float, float)
FETCH(fetch_f32_bf16, float, bf16)
FETCH(fetch_bf16_f32, bf16, float)
FETCH(fetch_bf16_bf16, bf16, bf16)
