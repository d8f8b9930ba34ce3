// bf16 values as floats and back, rounded: the state of the delta rule, which
// is float whatever the element type. See gpu/deltarule.go.
#include "element.cuh"

extern "C" __global__ void __launch_bounds__(256) widen(float *dst, const bf16 *src, long long n) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
    dst[i] = load(src + i);
}

extern "C" __global__ void __launch_bounds__(256) narrow(bf16 *dst, const float *src, long long n) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
    store(dst + i, src[i]);
}
