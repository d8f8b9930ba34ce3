// Sets *found where a bf16 matrix holds NaN or Inf: see gpu/fastattention.go.
#include "element.cuh"

extern "C" __global__ void __launch_bounds__(256)
    nonfinite(int *found, const bf16 *x, long long stride, long long rows, int cols) {
  const long long step = (long long)gridDim.x * blockDim.x;
  // Two values at a time: rows begin on 16 bytes and cols is even.
  const int pairs = cols / 2;
  bool bad = false;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < rows * pairs; i += step) {
    const unsigned v = ((const unsigned *)(x + i / pairs * stride))[i % pairs];
    bad |= (v & 0x7f80) == 0x7f80 || (v & 0x7f800000) == 0x7f800000;
  }
  if (bad)
    *found = 1;
}
