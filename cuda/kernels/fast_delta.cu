// The gated delta rule in chunks of 64 rows for sm_90a: bf16 in and out, the state
// and all that leads to it in float32. See gpu/fastdelta.go.
//
// With raw keys K, queries Q and values V of a chunk, inverse lengths c and d of
// keys and queries (d with the scale), G the sums of the log decay since the
// chunk's first row and S the state before it,
//
//   A_ij = beta_i c_i c_j e^(G_i-G_j) k_i·k_j for j < i, T = (I+A)^-1 diag(beta)
//   U    = T (V - diag(c e^G) K S)
//   O    = diag(d e^G) Q S + P U, P_ij = d_i c_j e^(G_i-G_j) q_i·k_j for j <= i
//   S'   = e^G_last S + (diag(c e^(G_last-G)) U)ᵀ K, transposed
//
// fast_delta_parts computes T, P and the diagonals, which do not need S, for all
// chunks at once. fast_delta_state walks the chunks of a head: a warpgroup has 64
// columns of the state in registers, transposed, so that every product takes its
// first operand from registers and no thread needs another's columns.
//
// Precision: keys and queries are bf16 and so exact operands; lengths, decays
// and beta are factors of sums. S, T, U and V - K S enter products that lead to
// the state as three bf16 values whose sum is the float32 value, small products
// first: a tensor core truncates every sum. For the same reason the state itself
// is never a tensor core's sum. Outputs are rounded to bf16 in the end: there
// two values stand for S, U and P. One for P would do on random keys, but when
// keys are alike its rounding errors are too, and add up.
#include "fast_mma.cuh"

constexpr int kRows = 64;                 // of a chunk
constexpr int kParts = 5 * kBox + 1024;   // of a chunk and head: T (3 boxes), P (2), then
                                          // c e^G, d e^G, c e^(G_last-G) [64] and e^G_last
constexpr int kUnits = 68, kHalf = 36;    // strides of matrices in shared memory

struct Rows {
  const bf16* data;
  long long stride;
  __device__ const bf16* row(long long i) const { return data + i * stride; }
};

__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  __nv_bfloat162 p = __floats2bfloat162_rn(lo, hi);
  return *(uint32_t*)&p;
}
__device__ __forceinline__ float low(uint32_t p) { return __uint_as_float(p << 16); }
__device__ __forceinline__ float high(uint32_t p) { return __uint_as_float(p & 0xffff0000u); }

// split sets the first n of three pairs to what rounding leaves of (a, b).
template <int n>
__device__ __forceinline__ void split(float a, float b, uint32_t& p0, uint32_t& p1, uint32_t& p2) {
  p0 = pack(a, b);
  a -= low(p0), b -= high(p0);
  p1 = pack(a, b);
  if (n > 2) p2 = pack(a - low(p1), b - high(p1));
}

// at is the offset of a value in a box with the 128-byte swizzle.
__device__ __forceinline__ int at(int row, int col) { return row * 128 + ((col >> 3 ^ row & 7) << 4) + (col & 7) * 2; }

// --- what does not need the state ---

template <int DK>
struct Room {
  static constexpr int kStride = DK + 8;
  union {
    struct {
      bf16 q[kRows * kStride], k[kRows * kStride];
    } in;
    struct {
      float a[kRows * kUnits];                              // -A
      float t1[32 * kHalf], t2[32 * kHalf], t21[32 * kHalf];  // T without beta: two triangles and what is below
      float mid[32 * kHalf];
    } of;
  };
  float whole[kRows], part[kRows];  // G / ln 2, in two
  float beta[kRows], c[kRows], d[kRows];
};

// times sets sum to 8 rows of column lane of x · y, x's first n columns being given.
__device__ __forceinline__ void times(float (&sum)[8], const float* x, int x_stride, const float* y, int n) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int e = 0; e < 8; e++) sum[e] = 0;
#pragma unroll 2
  for (int l = 0; l < n; l += 4) {
    float col[4];
#pragma unroll
    for (int m = 0; m < 4; m++) col[m] = y[(l + m) * kHalf + lane];
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const float4 four = *(const float4*)(x + e * x_stride + l);
      sum[e] = fmaf(four.x, col[0], sum[e]);
      sum[e] = fmaf(four.y, col[1], sum[e]);
      sum[e] = fmaf(four.z, col[2], sum[e]);
      sum[e] = fmaf(four.w, col[3], sum[e]);
    }
  }
}

// fast_delta_parts: a block a chunk and value head, 128 threads.
template <int DK>
__device__ __forceinline__ void parts_of(uint8_t* parts, Rows q, Rows k, Rows a, Rows b, const bf16* a_log, const bf16* dt_bias,
                                         long long rows, int key_heads, int val_heads) {
  __shared__ Room<DK> room;
  constexpr int stride = Room<DK>::kStride;
  const int chunk = blockIdx.x, head = blockIdx.y, kh = head / (val_heads / key_heads);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const long long row0 = (long long)chunk * kRows;
  const int given = (int)(rows - row0 < kRows ? rows - row0 : kRows);
  uint8_t* const to = parts + ((long long)chunk * val_heads + head) * kParts;

#pragma unroll
  for (int n = 0; n < kRows * DK / 8 / 128; n++) {
    const int i = (threadIdx.x + 128 * n) / (DK / 8), col = (threadIdx.x + 128 * n) % (DK / 8) * 8;
    uint4 x = make_uint4(0, 0, 0, 0), y = x;
    if (i < given) {
      x = *(const uint4*)(q.row(row0 + i) + kh * DK + col);
      y = *(const uint4*)(k.row(row0 + i) + kh * DK + col);
    }
    *(uint4*)(room.in.q + i * stride + col) = x;
    *(uint4*)(room.in.k + i * stride + col) = y;
  }
  if (warp == 0) {
    double sum[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = lane + 32 * h;
      float beta = 0;
      if (i < given) {
        beta = 1 / (1 + expf(-__bfloat162float(b.row(row0 + i)[head])));
        const float x = __bfloat162float(a.row(row0 + i)[head]) + __bfloat162float(dt_bias[head]);
        const float g = -expf(__bfloat162float(a_log[head])) * (x > 0 ? x + log1pf(expf(-x)) : log1pf(expf(x)));
        sum[h] = g < -1e4f ? -1e4 : (double)g * 1.4426950408889634;  // e^-1e4 is 0, and a difference is not NaN
      }
      room.beta[i] = beta;
    }
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
      const double x = __shfl_up_sync(~0u, sum[0], m), y = __shfl_up_sync(~0u, sum[1], m);
      if (lane >= m) sum[0] += x, sum[1] += y;
    }
    sum[1] += __shfl_sync(~0u, sum[0], 31);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const double whole = rint(sum[h]);
      room.whole[lane + 32 * h] = (float)whole, room.part[lane + 32 * h] = (float)(sum[h] - whole);
    }
  }
  __syncthreads();

  // Products of rows 16·warp.. with the keys up to them, and of keys and queries
  // with themselves, for their lengths.
  float kk[8][4] = {}, qk[8][4] = {}, own[2][2][4] = {};
  const uint32_t q_at = shared_address(room.in.q), k_at = shared_address(room.in.k);
#pragma unroll
  for (int s = 0; s < DK / 16; s++) {
    uint32_t x[4], y[4], w[4];
    const int first = (16 * warp + (lane >> 3 & 1) * 8 + (lane & 7)) * stride + 16 * s + (lane >> 4) * 8;
    load_matrices(x, q_at + 2 * first);
    load_matrices(y, k_at + 2 * first);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      mma_m16n8k16(own[0][h], y, y[h], y[2 + h]);
      mma_m16n8k16(own[1][h], x, x[h], x[2 + h]);
    }
#pragma unroll
    for (int p = 0; p < 4; p++) {
      if (p > warp) continue;
      load_matrices(w, k_at + 2 * ((16 * p + (lane >> 4) * 8 + (lane & 7)) * stride + 16 * s + (lane >> 3 & 1) * 8));
      mma_m16n8k16(qk[2 * p], x, w[0], w[1]);
      mma_m16n8k16(qk[2 * p + 1], x, w[2], w[3]);
      mma_m16n8k16(kk[2 * p], y, w[0], w[1]);
      mma_m16n8k16(kk[2 * p + 1], y, w[2], w[3]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++)
    if ((lane >> 2) / 2 == (lane & 3)) {
      const int i = 16 * warp + 8 * h + (lane >> 2);
      room.c[i] = rsqrtf((lane & 4 ? own[0][h][2 * h + 1] : own[0][h][2 * h]) + 1e-6f);
      room.d[i] = rsqrtf((lane & 4 ? own[1][h][2 * h + 1] : own[1][h][2 * h]) + 1e-6f) * rsqrtf((float)DK);
    }
  __syncthreads();

  float g[2], r[2], at_k[2], at_q[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int i = 16 * warp + (lane >> 2) + 8 * h;
    g[h] = room.whole[i], r[h] = room.part[i], at_k[h] = -room.beta[i] * room.c[i], at_q[h] = room.d[i];
  }
#pragma unroll
  for (int t = 0; t < 8; t++) {
    const int j = 8 * t + 2 * (lane & 3);
    const float2 whole = *(const float2*)(room.whole + j), rest = *(const float2*)(room.part + j), c = *(const float2*)(room.c + j);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = 16 * warp + (lane >> 2) + 8 * h;
      uint32_t p0 = 0, p1 = 0, none;
      if (t <= 2 * warp + 1) {
        // Only differences <= 0 are exponentiated.
        const float x = exp2_fast(j <= i ? (g[h] - whole.x) + (r[h] - rest.x) : -INFINITY) * c.x;
        const float y = exp2_fast(j < i ? (g[h] - whole.y) + (r[h] - rest.y) : -INFINITY) * c.y;
        split<2>(at_q[h] * x * qk[t][2 * h], at_q[h] * y * qk[t][2 * h + 1], p0, p1, none);
        const float a0 = at_k[h] * x * kk[t][2 * h], a1 = at_k[h] * y * kk[t][2 * h + 1];
        *(float2*)(room.of.a + i * kUnits + j) = make_float2(j < i ? a0 : 0, j + 1 < i ? a1 : 0);
      }
      *(uint32_t*)(to + 3 * kBox + at(i, j)) = p0, *(uint32_t*)(to + 4 * kBox + at(i, j)) = p1;
    }
  }
  if (threadIdx.x < kRows) {
    float* factors = (float*)(to + 5 * kBox);
    const int i = threadIdx.x;
    const float g = room.whole[i], r = room.part[i], last = room.whole[kRows - 1], end = room.part[kRows - 1];
    const float grown = exp2_fast(g) * exp2_fast(r);
    factors[i] = grown * room.c[i];
    factors[64 + i] = grown * room.d[i];
    factors[128 + i] = exp2_fast((last - g) + (end - r)) * room.c[i];
    if (i == 0) factors[192] = exp2_fast(last) * exp2_fast(end);
  }
  __syncthreads();

  // The two 32 x 32 triangles on the diagonal by substitution, a thread a column.
  if (warp < 2) {
    const float* from = room.of.a + 32 * warp * (kUnits + 1);
    float* t = warp ? room.of.t2 : room.of.t1;
    float x[32];
#pragma unroll
    for (int i = 0; i < 32; i++) {
      float sum[4] = {};
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 four = *(const float4*)(from + i * kUnits + j);
        sum[0] = fmaf(four.x, x[j], sum[0]);
        if (j + 1 < i) sum[1] = fmaf(four.y, x[j + 1], sum[1]);
        if (j + 2 < i) sum[2] = fmaf(four.z, x[j + 2], sum[2]);
        if (j + 3 < i) sum[3] = fmaf(four.w, x[j + 3], sum[3]);
      }
      x[i] = i < lane ? 0 : i == lane ? 1 : (sum[0] + sum[1]) + (sum[2] + sum[3]);
      t[i * kHalf + lane] = x[i];
    }
  }
  __syncthreads();
  // Below them, T21 = T22 · (-A21 · T11); a thread has 8 rows of a column.
  float sum[8];
  times(sum, room.of.a + (32 + 8 * warp) * kUnits, kUnits, room.of.t1, 32);
#pragma unroll
  for (int e = 0; e < 8; e++) room.of.mid[(8 * warp + e) * kHalf + lane] = sum[e];
  __syncthreads();
  times(sum, room.of.t2 + 8 * warp * kHalf, kHalf, room.of.mid, 8 * warp + 8);
#pragma unroll
  for (int e = 0; e < 8; e++) room.of.t21[(8 * warp + e) * kHalf + lane] = sum[e];
  __syncthreads();
  // T diag(beta) leaves in three pieces, 8 columns at a time.
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const int i = (threadIdx.x >> 3) + 16 * n, j = (threadIdx.x & 7) * 8;
    uint32_t piece[3][4] = {};
    if (i >= 32 || j < 32) {
      const float* t = (i < 32 ? room.of.t1 : j < 32 ? room.of.t21 : room.of.t2) + (i & 31) * kHalf + (j & 31);
#pragma unroll
      for (int m = 0; m < 4; m++) {
        const float x = t[2 * m], y = t[2 * m + 1];
        // 0 stays 0 where beta is NaN.
        split<3>(x == 0 ? 0 : x * room.beta[j + 2 * m], y == 0 ? 0 : y * room.beta[j + 2 * m + 1], piece[0][m], piece[1][m], piece[2][m]);
      }
    }
#pragma unroll
    for (int p = 0; p < 3; p++) *(uint4*)(to + p * kBox + at(i, j)) = make_uint4(piece[p][0], piece[p][1], piece[p][2], piece[p][3]);
  }
}

// --- the walk along the chunks ---

extern __shared__ __align__(1024) uint8_t raw[];

// plus adds a[64,64] · b to d, where b has 64 rows and its columns run along the
// sum. That b is a triangle is not used: products of fewer rows into a part of d
// make ptxas put a wait after every one.
__device__ __forceinline__ void plus(float (&d)[32], const uint32_t (&a)[16], uint32_t b, int add) {
#pragma unroll
  for (int i = 0; i < 4; i++) wgmma_m64n64k16_rows(d, a + 4 * i, rows_of(b + 32 * i), add || i);
}

// fast_delta_state: a block has columns 64·blockIdx.x.. of value head blockIdx.y;
// four warps compute and one more brings tiles, a chunk ahead. Where the state in
// the end is not finite, it and *redo stay for the recurrence to do again: within
// a chunk a value that is not finite would reach rows before it.
template <int DK>
__device__ __forceinline__ void state_of(const void* queries, const void* keys, const void* values, const uint8_t* parts, bf16* out,
                                         long long out_stride, float* state, long long state_stride, int* redo, long long rows,
                                         int key_heads, int val_heads, int val_dim) {
  constexpr int kKeys = DK / 64;  // boxes of a chunk's keys
  constexpr int kStage = (2 * kKeys + 6) * kBox + 1024;
  const uint32_t base = shared_address(raw), staged = base + 2 * kStage, bars = staged + kBox;
  const uint32_t flag = bars + 48;
  if (base & 1023) __trap();
  const int head = blockIdx.y, kh = head / (val_heads / key_heads), col0 = blockIdx.x * 64;
  const int chunks = (int)((rows + kRows - 1) / kRows);
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; s++) {
      barrier_init(bars + 8 * s, 1);         // keys and queries are there
      barrier_init(bars + 16 + 8 * s, 1);    // so is the rest
      barrier_init(bars + 32 + 8 * s, 128);  // all has been used
    }
    barriers_visible();
    *(int*)(raw + (flag - base)) = 0;
  }
  __syncthreads();

  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128) {
      map_acquire(queries), map_acquire(keys), map_acquire(values);
      for (int c = 0; c < chunks; c++) {
        const int s = c & 1;
        const uint32_t to = base + s * kStage;
        barrier_wait(bars + 32 + 8 * s, (c >> 1 & 1) ^ 1);
        barrier_expect(bars + 8 * s, 2 * kKeys * kBox);
        for (int i = 0; i < kKeys; i++) {
          copy_box(to + i * kBox, keys, kh * DK + 64 * i, c * kRows, bars + 8 * s);
          copy_box(to + (kKeys + i) * kBox, queries, kh * DK + 64 * i, c * kRows, bars + 8 * s);
        }
        barrier_expect(bars + 16 + 8 * s, kBox + kParts);
        copy_box(to + 2 * kKeys * kBox, values, head * val_dim + col0, c * kRows, bars + 16 + 8 * s);
        copy_bytes(to + (2 * kKeys + 1) * kBox, parts + ((long long)c * val_heads + head) * kParts, kParts, bars + 16 + 8 * s);
      }
    }
    return;
  }

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  // This thread's columns of the state are mine and mine + 8, its keys and rows
  // those of a warpgroup's sums.
  const int mine = col0 + 16 * warp + (lane >> 2), pair = 2 * (lane & 3);
  float* const states = state + (long long)head * DK * state_stride;
  float s[DK / 2];
#pragma unroll
  for (int i = 0; i < DK / 2; i++) {
    const int key = 8 * (i >> 2) + pair + (i & 1), col = mine + 8 * (i >> 1 & 1);
    s[i] = col < val_dim ? states[key * state_stride + col] : 0;
  }
  // Where this lane's row of four 8 x 8 matrices lies in a box of 64 rows: rows
  // 8·(lane/16).., columns 16·warp + 8·(lane/8%2)..
  const uint32_t my_row = at((lane >> 4) * 8 + (lane & 7), 16 * warp + (lane >> 3 & 1) * 8);

  for (int c = 0; c < chunks; c++) {
    const uint32_t k_at = base + (c & 1) * kStage, q_at = k_at + kKeys * kBox, v_at = q_at + kKeys * kBox;
    const uint32_t t_at = v_at + kBox, p_at = t_at + 3 * kBox, factors = p_at + 2 * kBox + 4 * pair;
    float x[32], o[32], u[32];
    uint32_t r0[16], r1[16], r2[16];
    {
      uint32_t s0[DK / 4], s1[DK / 4], s2[DK / 4];
#pragma unroll
      for (int i = 0; i < DK / 4; i++) split<3>(s[2 * i], s[2 * i + 1], s0[i], s1[i], s2[i]);
      barrier_wait(bars + 8 * (c & 1), c >> 1 & 1);
      wgmma_begin();
#pragma unroll
      for (int n = 0; n < 3; n++)
#pragma unroll
        for (int i = 0; i < DK / 16; i++)
          wgmma_m64n64k16_rows(x, (n == 0 ? s2 : n == 1 ? s1 : s0) + 4 * i, rows_of(k_at + (i >> 2) * kBox + (i & 3) * 32), n + i > 0);
      wgmma_commit();
      wgmma_wait<0>();
      held(x);
      wgmma_begin();
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < DK / 16; i++)
          wgmma_m64n64k16_rows(o, (n == 0 ? s1 : s0) + 4 * i, rows_of(q_at + (i >> 2) * kBox + (i & 3) * 32), n + i > 0);
      wgmma_commit();
      barrier_wait(bars + 16 + 8 * (c & 1), c >> 1 & 1);
      // x becomes V - diag(c e^G) K S, transposed.
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32_t v[4];
        load_transposed(v, v_at + my_row + j * 1024);
#pragma unroll
        for (int m = 0; m < 2; m++) {
          const float2 by = read_pair(factors + (j + m) * 32);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float* to = x + 4 * (j + m) + 2 * h;
            to[0] = fmaf(-by.x, to[0], low(v[2 * m + h]));
            to[1] = fmaf(-by.y, to[1], high(v[2 * m + h]));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 16; i++) split<3>(x[2 * i], x[2 * i + 1], r0[i], r1[i], r2[i]);
      wgmma_wait<0>();
      held(o);
    }
    {
      wgmma_begin();
      plus(u, r2, t_at, 0);
      plus(u, r1, t_at + kBox, 1);
      plus(u, r0, t_at + 2 * kBox, 1);
      plus(u, r1, t_at, 1);
      plus(u, r0, t_at + kBox, 1);
      plus(u, r0, t_at, 1);
      wgmma_commit();
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float2 by = read_pair(factors + 256 + j * 32);
#pragma unroll
        for (int h = 0; h < 2; h++) o[4 * j + 2 * h] *= by.x, o[4 * j + 2 * h + 1] *= by.y;
      }
      wgmma_wait<0>();
      held(u);
    }
    {
      uint32_t u0[16], u1[16], none;
#pragma unroll
      for (int i = 0; i < 16; i++) split<2>(u[2 * i], u[2 * i + 1], u0[i], u1[i], none);
      wgmma_begin();
      plus(o, u1, p_at, 1);
      plus(o, u0, p_at + kBox, 1);
      plus(o, u0, p_at, 1);
      wgmma_commit();
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float2 by = read_pair(factors + 512 + j * 32);
#pragma unroll
        for (int h = 0; h < 2; h++) u[4 * j + 2 * h] *= by.x, u[4 * j + 2 * h + 1] *= by.y;
      }
      wgmma_wait<0>();
      held(o);
    }
    const float decay = read_pair(p_at + 2 * kBox + 768).x;
    float more[DK / 2];
    {
      uint32_t u0[16], u1[16], u2[16];
#pragma unroll
      for (int i = 0; i < 16; i++) split<3>(u[2 * i], u[2 * i + 1], u0[i], u1[i], u2[i]);
      wgmma_begin();
#pragma unroll
      for (int n = 0; n < 3; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint32_t* with = (n == 0 ? u2 : n == 1 ? u1 : u0) + 4 * i;
          if (DK == 128)
            wgmma_m64n128k16_columns(more, with, columns_of(k_at + i * 2048, kBox), n + i > 0);
          else
            wgmma_m64n64k16_columns(more, with, columns_of(k_at + i * 2048, kBox), n + i > 0);
        }
      wgmma_commit();
      warpgroup_sync();  // the chunk before has left the stage
#pragma unroll
      for (int j = 0; j < 8; j += 2)
        store_transposed(staged + my_row + j * 1024, pack(o[4 * j], o[4 * j + 1]), pack(o[4 * j + 2], o[4 * j + 3]), pack(o[4 * j + 4], o[4 * j + 5]),
                         pack(o[4 * j + 6], o[4 * j + 7]));
      warpgroup_sync();
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const int i = (threadIdx.x >> 3) + 16 * n, col = (threadIdx.x & 7) * 8;
        const long long row = (long long)c * kRows + i;
        if (row < rows && col0 + col < val_dim) *(uint4*)(out + row * out_stride + head * val_dim + col0 + col) = read_shared(staged + at(i, col));
      }
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < DK / 2; i++) asm volatile("" : "+f"(more[i])::"memory");
    }
    barrier_arrive(bars + 32 + 8 * (c & 1));
#pragma unroll
    for (int i = 0; i < DK / 2; i++) s[i] = fmaf(s[i], decay, more[i]);
  }

  bool bad = false;
#pragma unroll
  for (int i = 0; i < DK / 2; i++)
    if (mine + 8 * (i >> 1 & 1) < val_dim && !(fabsf(s[i]) <= 3.4e38f)) bad = true;
  if (bad) *(volatile int*)(raw + (flag - base)) = 1;
  warpgroup_sync();
  if (*(volatile int*)(raw + (flag - base))) {
    if (threadIdx.x == 0) redo[head * gridDim.x + blockIdx.x] = 1, redo[val_heads * gridDim.x] = 1;
    return;
  }
#pragma unroll
  for (int i = 0; i < DK / 2; i++) {
    const int key = 8 * (i >> 2) + pair + (i & 1), col = mine + 8 * (i >> 1 & 1);
    if (col < val_dim) states[key * state_stride + col] = s[i];
  }
}

#define DELTA(DK)                                                                                                          \
  extern "C" __global__ void __launch_bounds__(128, 5)                                                                      \
      fast_delta_parts##DK(uint8_t* parts, const bf16* q, long long q_stride, const bf16* k, long long k_stride,          \
                           const bf16* a, long long a_stride, const bf16* b, long long b_stride, const bf16* a_log,       \
                           const bf16* dt_bias, long long rows, int key_heads, int val_heads) {                           \
    parts_of<DK>(parts, {q, q_stride}, {k, k_stride}, {a, a_stride}, {b, b_stride}, a_log, dt_bias, rows, key_heads, val_heads); \
  }                                                                                                                        \
  extern "C" __global__ void __launch_bounds__(160, 1)                                                                     \
      fast_delta_state##DK(const void* queries, const void* keys, const void* values, const uint8_t* parts, bf16* out,    \
                           long long out_stride, float* state, long long state_stride, int* redo, long long rows,         \
                           int key_heads, int val_heads, int val_dim) {                                                    \
    state_of<DK>(queries, keys, values, parts, out, out_stride, state, state_stride, redo, rows, key_heads, val_heads, val_dim); \
  }

DELTA(64)
DELTA(128)
