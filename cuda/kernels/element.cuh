// What every kernel needs: elements are float or bf16, arithmetic is float.
// A kernel of an operation is a template over its element type, with one
// entry for each: NAME_f32 and NAME_bf16.
#pragma once
#include <cuda_bf16.h>

typedef __nv_bfloat16 bf16;

__device__ inline float load(const float *p) { return *p; }
__device__ inline float load(const bf16 *p) { return __bfloat162float(*p); }
__device__ inline void store(float *p, float v) { *p = v; }
__device__ inline void store(bf16 *p, float v) { *p = __float2bfloat16_rn(v); }

// Rows of a matrix may lie more than 2^31 elements apart.
template <typename T> struct Matrix {
  T *data;
  long long stride;
  __device__ T *row(long long i) const { return data + i * stride; }
};

// The sum of v over the block's threads, in every thread, always added in the
// same order. room holds 32 values of shared memory and is free again after.
__device__ inline double block_sum(double v, double *room) {
  for (int d = 16; d > 0; d /= 2)
    v += __shfl_xor_sync(~0u, v, d);
  int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (threadIdx.x % 32 == 0)
    room[warp] = v;
  __syncthreads();
  double sum = room[0];
  for (int i = 1; i < warps; i++)
    sum += room[i];
  __syncthreads();
  return sum;
}
