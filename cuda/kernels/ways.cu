// What is needed to compare two ways to multiply: see gpu/ways.go.
#include "element.cuh"

// noise sets x to values in -1..1 that follow from seed.
extern "C" __global__ void __launch_bounds__(256) noise(bf16 *x, long long n, unsigned seed) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
    unsigned h = (unsigned)i * 0x9e3779b1u ^ (unsigned)(i >> 32) ^ seed * 0x85ebca6bu;
    h = (h ^ h >> 16) * 0x7feb352du;
    h = (h ^ h >> 15) * 0x846ca68bu;
    h ^= h >> 16;
    x[i] = __float2bfloat16_rn((float)(int)h * 0x1p-31f);
  }
}

// negate sets dst = -src.
extern "C" __global__ void __launch_bounds__(256) negate(unsigned short *dst, const unsigned short *src, long long n) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
    dst[i] = src[i] ^ 0x8000;
}

// differ sets *found where a and b have other bits.
extern "C" __global__ void __launch_bounds__(256)
    differ(int *found, const unsigned short *a, const unsigned short *b, long long n) {
  const long long step = (long long)gridDim.x * blockDim.x;
  bool other = false;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
    other |= a[i] != b[i];
  if (other)
    *found = 1;
}
