// The passes between matrix products as the workbench has them, bf16 with
// float32 arithmetic, for dense rows and one shape of head. The program's are
// rmsnorm.cu, normrope.cu and gatemul.cu, which take rows that lie anywhere.
// Rows are dense unless a stride is named.
#pragma once
#include "../fast_ops.cu"

// fast_rmsnorm sets out's rows to x / sqrt(mean(x²)+eps) · (gain + w). A block
// a row of at most 32 values a thread, cols a multiple of 8. With group > 0, the
// first row of every group of so many is left out and the others move up: the
// slots of a block that the head scores.
extern "C" __global__ void fast_rmsnorm(bf16* out, const bf16* x, const bf16* w, long long cols, double eps, double gain, long long group) {
  __shared__ float parts[32];
  const long long row = blockIdx.x, chunks = cols / 8;
  long long to = row;
  if (group > 0) {
    if (row % group == 0) return;
    to = row / group * (group - 1) + row % group - 1;
  }
  const uint4* from = (const uint4*)(x + row * cols);
  Eight v[4];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    long long at = threadIdx.x + (long long)i * blockDim.x;
    if (at < chunks) v[i].all = from[at];
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (threadIdx.x + (long long)i * blockDim.x < chunks) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float2 f = __bfloat1622float2(v[i].two[j]);
        sum += f.x * f.x + f.y * f.y;
      }
    }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < (blockDim.x + 31) / 32; i++) sum += parts[i];
  const float by = rsqrtf(sum / cols + (float)eps), plus = (float)gain;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    long long at = threadIdx.x + (long long)i * blockDim.x;
    if (at < chunks) {
      Eight g, y;
      g.all = ((const uint4*)w)[at];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float2 f = __bfloat1622float2(v[i].two[j]), h = __bfloat1622float2(g.two[j]);
        y.two[j] = __floats2bfloat162_rn(f.x * by * (plus + h.x), f.y * by * (plus + h.y));
      }
      ((uint4*)(out + to * cols))[at] = y.all;
    }
  }
}

// fast_rope_table sets table[row][i] to the cosine and sine of pos[row] ·
// theta^(-2i/dim), i < dim/2, one thread an entry.
extern "C" __global__ void fast_rope_table(float2* table, const int* pos, long long rows, long long dim, double theta) {
  const long long n = blockIdx.x * (long long)blockDim.x + threadIdx.x, half = dim / 2;
  if (n >= rows * half) return;
  double angle = pos[n / half] * pow(theta, -2.0 * (n % half) / dim), s, c;
  sincos(angle, &s, &c);
  table[n] = make_float2((float)c, (float)s);
}

// fast_norm_rope gives heads of 128 values RMSNorm and then RoPE, in place, a
// warp a head. Row r of group g has its heads at x + r·stride + g·step; the
// first of them take w + g·128, the others w2 + g·128 as gains (queries, then
// keys). Grid: (rows·heads/8 rounded up, groups), 256 threads.
extern "C" __global__ void fast_norm_rope(bf16* x, long long stride, long long step, const bf16* w, long long heads, const bf16* w2,
                                          long long heads2, const float2* table, long long rows, double eps) {
  const int lane = threadIdx.x % 32;
  const long long all = heads + heads2, n = blockIdx.x * 8ll + threadIdx.x / 32, row = n / all, head = n % all;
  if (row >= rows) return;
  bf16* at = x + row * stride + blockIdx.y * step + head * 128;
  const bf16* gains = (head < heads ? w : w2) + blockIdx.y * 128;
  __nv_bfloat162 *lo = (__nv_bfloat162*)at + lane, *hi = lo + 32;
  float2 a = __bfloat1622float2(*lo), b = __bfloat1622float2(*hi);
  const float by = rsqrtf(warp_sum(a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y) / 128 + (float)eps);
  const float2 g = __bfloat1622float2(((const __nv_bfloat162*)gains)[lane]), h = __bfloat1622float2(((const __nv_bfloat162*)gains)[lane + 32]);
  a.x *= by * g.x, a.y *= by * g.y, b.x *= by * h.x, b.y *= by * h.y;
  const float4 t = ((const float4*)(table + row * 64))[lane];  // cos, sin of 2·lane, then of 2·lane+1
  *lo = __floats2bfloat162_rn(a.x * t.x - b.x * t.y, a.y * t.z - b.y * t.w);
  *hi = __floats2bfloat162_rn(b.x * t.x + a.x * t.y, b.y * t.z + a.y * t.w);
}

// fast_silu_mul sets out[r][c] = silu(gate_up[r][c]) · gate_up[r][width+c], a
// thread 8 values.
extern "C" __global__ void fast_silu_mul(bf16* out, const bf16* gate_up, long long rows, long long width) {
  const long long n = blockIdx.x * (long long)blockDim.x + threadIdx.x, chunks = width / 8, row = n / chunks, at = n % chunks;
  if (row >= rows) return;
  Eight g, u, y;
  g.all = ((const uint4*)(gate_up + row * 2 * width))[at];
  u.all = ((const uint4*)(gate_up + row * 2 * width + width))[at];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float2 a = __bfloat1622float2(g.two[j]), b = __bfloat1622float2(u.two[j]);
    y.two[j] = __floats2bfloat162_rn(a.x / (1 + __expf(-a.x)) * b.x, a.y / (1 + __expf(-a.y)) * b.y);
  }
  ((uint4*)(out + row * width))[at] = y.all;
}
