// Block attention for sm_90a: 16 rows of a draft block at a time, 4 query heads
// to a key/value head, 128 dimensions, bf16 with float32 sums.
//
// The 16 rows of the 4 query heads of a key/value head are the 64 rows of one
// warpgroup's product, head by head: a block of the grid takes 16 rows and one
// key/value head. Each row sees a span of the context and a span of the rows of
// its own call (cuda.Span); keys outside all 16 spans are never read, and masks
// are applied only in tiles of 64 keys that some span cuts. One more warp brings
// tiles of keys and values, kTiles of them under way. While one block of a
// multiprocessor is at its softmax, the other multiplies.
//
// Grid: (blocks of 16 rows, key/value heads), 160 threads. Maps: queries in boxes
// of 16 x 64, keys and values in boxes of 64 x 64, all with the 128-byte swizzle.
// Arguments are 8 bytes each. A row that sees nothing gets zeros. Masked keys of
// a tile that is read have weight 0, which makes NaN of values that are not
// finite; past the ends of the maps they are zeros. So *odd is set to mark where
// a result is not finite, be it right or not.
#include "fast_sm90.cuh"
#include "fast_wgmma.cuh"

constexpr int kTiles = 3;
constexpr int kTile = 4 * kBox;  // keys (2 boxes), values (2 boxes)
// Two blocks fit on a multiprocessor only without room for rounding up: dynamic
// shared memory starts at a multiple of 1024 where a kernel has no other.
constexpr int kAttentionShared = 2 * kBox + kTiles * kTile + 128;

extern __shared__ __align__(1024) uint8_t raw[];

// Reach is what the 16 rows of a block see between them.
struct Reach {
  int ctx_lo, ctx_hi, blk_lo, blk_hi;  // of any row
  int ctx_from, ctx_to, blk_from, blk_to;  // of every row
  __device__ int ctx_tiles() const { return ctx_hi > ctx_lo ? (ctx_hi - ctx_lo + 63) / 64 : 0; }
  __device__ int blk_tiles() const { return blk_hi > blk_lo ? (blk_hi - blk_lo + 63) / 64 : 0; }
};

// reach_of is computed by whole warps. Rows past the end see nothing.
__device__ __forceinline__ Reach reach_of(const int4* spans, int row0, int rows) {
  const int lane = threadIdx.x & 31, row = row0 + (lane & 15);
  int4 s = row < rows ? spans[row] : make_int4(0, 0, 0, 0);
  constexpr int far = 0x7fffffff;
  bool ctx = s.x < s.y, blk = s.z < s.w;
  Reach r = {ctx ? s.x : far, ctx ? s.y : 0, blk ? s.z : far, blk ? s.w : 0, s.x, s.y, s.z, s.w};
#pragma unroll
  for (int m = 8; m; m >>= 1) {
    r.ctx_lo = min(r.ctx_lo, __shfl_xor_sync(~0u, r.ctx_lo, m));
    r.ctx_hi = max(r.ctx_hi, __shfl_xor_sync(~0u, r.ctx_hi, m));
    r.blk_lo = min(r.blk_lo, __shfl_xor_sync(~0u, r.blk_lo, m));
    r.blk_hi = max(r.blk_hi, __shfl_xor_sync(~0u, r.blk_hi, m));
    r.ctx_from = max(r.ctx_from, __shfl_xor_sync(~0u, r.ctx_from, m));
    r.ctx_to = min(r.ctx_to, __shfl_xor_sync(~0u, r.ctx_to, m));
    r.blk_from = max(r.blk_from, __shfl_xor_sync(~0u, r.blk_from, m));
    r.blk_to = min(r.blk_to, __shfl_xor_sync(~0u, r.blk_to, m));
  }
  return r;
}

__device__ __forceinline__ uint32_t pack(float a, float b) {
  __nv_bfloat162 p = __floats2bfloat162_rn(a, b);
  return *(uint32_t*)&p;
}

extern "C" __global__ void __launch_bounds__(160, 2)
    fast_attention(const void* queries, const void* ctx_keys, const void* ctx_values, const void* blk_keys, const void* blk_values,
                   const int4* spans, bf16* out, long long out_stride, long long rows, double scale, int* odd, int mark) {
  const uint32_t base = shared_address(raw);
  if (base & 1023) __trap();
  const uint32_t tiles_at = base + 2 * kBox, bars = tiles_at + kTiles * kTile;
  const uint32_t full_q = bars, full_k = bars + 8, full_v = full_k + 8 * kTiles, empty = full_v + 8 * kTiles;
  const int block = gridDim.x - 1 - blockIdx.x, head = blockIdx.y;  // late blocks see most: first
  const int row0 = block * 16;
  if (threadIdx.x == 0) {
    barrier_init(full_q, 1);
    for (int s = 0; s < kTiles; s++) {
      barrier_init(full_k + 8 * s, 1);
      barrier_init(full_v + 8 * s, 1);
      barrier_init(empty + 8 * s, 128);
    }
    barriers_visible();
  }
  __syncthreads();
  const Reach reach = reach_of(spans, row0, (int)rows);
  const int ctx_tiles = reach.ctx_tiles(), tiles = ctx_tiles + reach.blk_tiles();

  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128) {
      map_acquire(queries);
      barrier_expect(full_q, 2 * kBox);
      for (int h = 0; h < 4; h++)
        for (int half = 0; half < 2; half++)
          copy_box(base + half * kBox + h * (kBox / 4), queries, (head * 4 + h) * 128 + half * 64, row0, full_q);
      if (ctx_tiles > 0) map_acquire(ctx_keys), map_acquire(ctx_values);
      if (tiles > ctx_tiles) map_acquire(blk_keys), map_acquire(blk_values);
      int s = 0, phase = 1;
      for (int i = 0; i < tiles; i++) {
        const bool ctx = i < ctx_tiles;
        const int key = ctx ? reach.ctx_lo + 64 * i : reach.blk_lo + 64 * (i - ctx_tiles);
        const void *k = ctx ? ctx_keys : blk_keys, *v = ctx ? ctx_values : blk_values;
        const uint32_t at = tiles_at + s * kTile;
        barrier_wait(empty + 8 * s, phase);
        barrier_expect(full_k + 8 * s, 2 * kBox);
        copy_box(at, k, head * 128, key, full_k + 8 * s);
        copy_box(at + kBox, k, head * 128 + 64, key, full_k + 8 * s);
        barrier_expect(full_v + 8 * s, 2 * kBox);
        copy_box(at + 2 * kBox, v, head * 128, key, full_v + 8 * s);
        copy_box(at + 3 * kBox, v, head * 128 + 64, key, full_v + 8 * s);
        if (++s == kTiles) s = 0, phase ^= 1;
      }
    }
    return;
  }

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, pair = 2 * (lane & 3);
  int4 span[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int row = row0 + (lane >> 2) + 8 * h;
    span[h] = row < rows ? spans[row] : make_int4(0, 0, 0, 0);
  }
  const float by = (float)scale * 1.4426950408889634f;  // scores in bits
  float sums[64], largest[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 64; i++) sums[i] = 0;

  float s[32];
  // scores starts the product of the queries with the keys of tile i.
  auto scores = [&](int i) {
    const uint32_t at = tiles_at + i % kTiles * kTile;
    barrier_wait(full_k + 8 * (i % kTiles), i / kTiles & 1);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const uint32_t to = (k >> 2) * kBox + (k & 3) * 32;
      wgmma_m64n64k16(s, rows_of(base + to), rows_of(at + to), k != 0);
    }
    wgmma_commit();
  };
  // attend turns the scores of tile i into weights and starts their product
  // with the values.
  auto attend = [&](int i) {
    const bool ctx = i < ctx_tiles;
    const int key = ctx ? reach.ctx_lo + 64 * i : reach.blk_lo + 64 * (i - ctx_tiles);
    if (ctx ? key < reach.ctx_from || key + 64 > reach.ctx_to : key < reach.blk_from || key + 64 > reach.blk_to) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int lo = (ctx ? span[h].x : span[h].z) - key - pair, hi = (ctx ? span[h].y : span[h].w) - key - pair;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            if (8 * j + e < lo || 8 * j + e >= hi) s[4 * j + 2 * h + e] = -INFINITY;
      }
    }
    uint32_t p[16];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = largest[h];
#pragma unroll
      for (int j = 0; j < 8; j++) top = fmaxf(top, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      top = quad_max(top);
      const float shift = top == -INFINITY ? 0 : top * by;
      const float keep = exp2_fast(fmaf(largest[h], by, -shift));  // 0 while nothing was seen
      largest[h] = top;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float a = exp2_fast(fmaf(s[4 * j + 2 * h], by, -shift)), b = exp2_fast(fmaf(s[4 * j + 2 * h + 1], by, -shift));
        sum += a + b;
        p[2 * j + h] = pack(a, b);
      }
      total[h] = total[h] * keep + sum;
#pragma unroll
      for (int j = 0; j < 16; j++) sums[4 * j + 2 * h] *= keep, sums[4 * j + 2 * h + 1] *= keep;
    }
    const uint32_t at = tiles_at + i % kTiles * kTile + 2 * kBox;
    barrier_wait(full_v + 8 * (i % kTiles), i / kTiles & 1);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; k++)
      wgmma_m64n128k16_ra(sums, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], columns_of(at + k * 2048, kBox), 1);
    wgmma_commit();
  };

  barrier_wait(full_q, 0);
  if (tiles > 0) {
    scores(0);
    wgmma_wait<0>();
    held(s);
    for (int i = 0; i + 1 < tiles; i++) {
      attend(i);
      scores(i + 1);
      wgmma_wait<0>();
      held(s);
      held(sums);
      barrier_arrive(empty + 8 * (i % kTiles));
    }
    attend(tiles - 1);
    wgmma_wait<0>();
    held(sums);
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = row0 + (lane >> 2) + 8 * h;
    const float all = quad_sum(total[h]), inverse = all == 0 ? 0 : 1 / all;
    if (row >= rows) continue;
    bf16* to = out + row * out_stride + (head * 4 + warp) * 128 + pair;
    bool finite = true;
#pragma unroll
    for (int j = 0; j < 16; j++) {
      const uint32_t two = pack(sums[4 * j + 2 * h] * inverse, sums[4 * j + 2 * h + 1] * inverse);
      finite = finite && (two & 0x7f80) != 0x7f80 && (two & 0x7f800000) != 0x7f800000;
      *(uint32_t*)(to + 8 * j) = two;
    }
    if (!finite) *odd = mark;
  }
}
