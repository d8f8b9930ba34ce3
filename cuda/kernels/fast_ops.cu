// The tap packer, bf16: it moves bytes, so it reads each once and in 16-byte
// pieces. Arguments are 8 bytes each.
#include <cuda_bf16.h>
#include <stdint.h>

typedef __nv_bfloat16 bf16;

// Eight are 8 bf16 values.
union Eight {
  uint4 all;
  __nv_bfloat162 two[4];
};

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(~0u, v, m);
  return v;
}

// fast_pack copies rows of several layers side by side: out[r] = the layers'
// rows ids[r] (or r, where ids is null), one after the other. In the same pass
// each such row of cols values gets its norm, its number of values that are not
// finite, and a checksum: Σ word_i·(2i+1) over its 32-bit words, modulo 2^64.
// sources and strides (in values) have one entry a layer. A warp a row of a
// layer, grid (rows·layers/8 rounded up), 256 threads; cols a multiple of 8.
extern "C" __global__ void __launch_bounds__(256)
    fast_pack(bf16* out, const bf16* const* sources, const long long* strides, const int* ids, float* norms, unsigned* bad,
              unsigned long long* checksums, long long rows, long long layers, long long cols) {
  const long long n = blockIdx.x * 8ll + threadIdx.x / 32, row = n / layers, layer = n % layers;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32, chunks = (int)(cols / 8);
  const uint4* from = (const uint4*)(sources[layer] + (ids ? ids[row] : row) * strides[layer]);
  uint4* to = (uint4*)(out + n * cols);
  float sum = 0;
  unsigned odd = 0;
  unsigned long long check = 0;
  constexpr int deep = 10;
  for (int base = 0; base < chunks; base += 32 * deep) {
    Eight v[deep];
#pragma unroll
    for (int i = 0; i < deep; i++) {
      int at = base + 32 * i + lane;
      if (at < chunks) v[i].all = __ldcs(from + at);
    }
#pragma unroll
    for (int i = 0; i < deep; i++) {
      int at = base + 32 * i + lane;
      if (at < chunks) {
        __stcs(to + at, v[i].all);
        const unsigned words[4] = {v[i].all.x, v[i].all.y, v[i].all.z, v[i].all.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          float2 f = __bfloat1622float2(v[i].two[j]);
          sum = fmaf(f.x, f.x, fmaf(f.y, f.y, sum));
          odd += ((words[j] & 0x7f80u) == 0x7f80u) + ((words[j] & 0x7f800000u) == 0x7f800000u);
          check += (unsigned long long)words[j] * (unsigned)(2 * (4 * at + j) + 1);
        }
      }
    }
  }
  sum = warp_sum(sum);
#pragma unroll
  for (int m = 16; m; m >>= 1) {
    odd += __shfl_xor_sync(~0u, odd, m);
    check += __shfl_xor_sync(~0u, check, m);
  }
  if (lane == 0) norms[n] = sqrtf(sum), bad[n] = odd, checksums[n] = check;
}
