// Attention for sm_90a: heads of 128 or 256 dimensions, bf16 with float32 sums.
//
// A block of the grid takes a tile of neighbouring query rows and one key/value
// head. The 64 rows of its warpgroup's products are slots of `per` rows, a slot
// for each query head of the group: 16 rows by 4 heads, say. Each row sees a
// span of the context and a span of the rows of its own call (cuda.Span); keys
// that no row of the tile sees are never read, but for the rest of their tile of
// 64 keys. One more warp brings tiles of keys and values, several under way.
// While one block of a multiprocessor is at its softmax, another multiplies.
//
// Tiles of keys begin at multiples of 64 rows, whatever the spans, and a masked
// key adds exactly nothing. So a row's result does not depend on which rows
// share its tile: prefill, decoding and drafting may cut rows as they like.
//
// Grid: (tiles, key/value heads), 160 threads. Maps: queries in boxes of per x
// 64, keys and values in boxes of 64 x 64, all with the 128-byte swizzle.
// Arguments are 8 bytes each. A row that sees nothing gets zeros. A NaN or Inf in
// a key or value reaches the rows that see it and no others: where a sum is NaN
// at the end, the block begins again and looks into every tile that it masks.
#include "fast_sm90.cuh"
#include "fast_wgmma.cuh"

extern __shared__ __align__(1024) uint8_t raw[];

// Room is the shared memory of a block whose heads have halves x 128 dims.
// Two blocks of the smaller kind fit on a multiprocessor only without room for
// rounding up: dynamic shared memory starts at a multiple of 1024 where a
// kernel has no other.
template <int halves> struct Room {
  static constexpr int boxes = 2 * halves;         // of queries, keys or values
  static constexpr int tile = 2 * boxes * kBox;    // keys, then values
  static constexpr int tiles = halves == 1 ? 3 : 2;  // under way
  static constexpr int bytes = boxes * kBox + tiles * tile + 128;
};
constexpr int kAttentionShared128 = 114816;
constexpr int kAttentionShared256 = 163968;
static_assert(Room<1>::bytes == kAttentionShared128 && Room<2>::bytes == kAttentionShared256, "as gpu/fastattention.go asks for");

// Reach is what the rows of a tile see between them.
struct Reach {
  int ctx_lo, ctx_hi, blk_lo, blk_hi;      // of any row, lo at a multiple of 64
  int ctx_from, ctx_to, blk_from, blk_to;  // of every row
  __device__ int ctx_tiles() const { return ctx_hi > ctx_lo ? (ctx_hi - ctx_lo + 63) / 64 : 0; }
  __device__ int blk_tiles() const { return blk_hi > blk_lo ? (blk_hi - blk_lo + 63) / 64 : 0; }
};

// reach_of is computed by whole warps, over the n rows from row0.
__device__ __forceinline__ Reach reach_of(const int4* spans, int row0, int n) {
  constexpr int far = 0x7fffffff;
  Reach r = {far, 0, far, 0, 0, far, 0, far};
  for (int i = threadIdx.x & 31; i < n; i += 32) {
    const int4 s = spans[row0 + i];
    if (s.x < s.y) r.ctx_lo = min(r.ctx_lo, s.x), r.ctx_hi = max(r.ctx_hi, s.y);
    if (s.z < s.w) r.blk_lo = min(r.blk_lo, s.z), r.blk_hi = max(r.blk_hi, s.w);
    r.ctx_from = max(r.ctx_from, s.x), r.ctx_to = min(r.ctx_to, s.y);
    r.blk_from = max(r.blk_from, s.z), r.blk_to = min(r.blk_to, s.w);
  }
#pragma unroll
  for (int m = 16; m; m >>= 1) {
    r.ctx_lo = min(r.ctx_lo, __shfl_xor_sync(~0u, r.ctx_lo, m));
    r.ctx_hi = max(r.ctx_hi, __shfl_xor_sync(~0u, r.ctx_hi, m));
    r.blk_lo = min(r.blk_lo, __shfl_xor_sync(~0u, r.blk_lo, m));
    r.blk_hi = max(r.blk_hi, __shfl_xor_sync(~0u, r.blk_hi, m));
    r.ctx_from = max(r.ctx_from, __shfl_xor_sync(~0u, r.ctx_from, m));
    r.ctx_to = min(r.ctx_to, __shfl_xor_sync(~0u, r.ctx_to, m));
    r.blk_from = max(r.blk_from, __shfl_xor_sync(~0u, r.blk_from, m));
    r.blk_to = min(r.blk_to, __shfl_xor_sync(~0u, r.blk_to, m));
  }
  r.ctx_lo &= ~63, r.blk_lo &= ~63;
  return r;
}

__device__ __forceinline__ uint32_t pack(float a, float b) {
  __nv_bfloat162 p = __floats2bfloat162_rn(a, b);
  return *(uint32_t*)&p;
}

// odd is whether one of the two values of a word is NaN or Inf.
__device__ __forceinline__ bool odd(uint32_t w) { return (w & 0x7f80u) == 0x7f80u || (w & 0x7f800000u) == 0x7f800000u; }

// any_of says in all 128 threads of the warpgroup whether some thread says so.
__device__ __forceinline__ bool any_of(bool mine) {
  uint32_t some;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 q, %1, 0;\nbarrier.cta.red.or.pred p, 1, 128, q;\nselp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(some)
      : "r"((uint32_t)mine)
      : "memory");
  return some != 0;
}

// isolate looks for NaN and Inf in a tile of values of which some rows see only
// a part: weights of 0 would carry them to the others. The sums of rows that do
// see one become NaN, and the tile has 0 in its place. lo and hi are the keys
// of the tile that the thread's two rows see.
template <int halves>
__device__ __forceinline__ void isolate(uint32_t tile, const int (&lo)[2], const int (&hi)[2], float (&sums)[halves][64]) {
  uint4* at = (uint4*)(raw + (tile - shared_address(raw)));
  constexpr int chunks = 2 * halves * kBox / 16 / 128;  // of a thread
  bool found = false;
#pragma unroll 4
  for (int i = 0; i < chunks; i++) {
    const uint4 v = at[threadIdx.x + 128 * i];
    found |= odd(v.x) || odd(v.y) || odd(v.z) || odd(v.w);
  }
  if (!any_of(found)) return;
  const int pair = 2 * (threadIdx.x & 3);
#pragma unroll
  for (int n = 0; n < halves; n++)
#pragma unroll
    for (int j = 0; j < 16; j++)
      for (int key = 0; key < 64; key++) {
        const int col = n * 128 + 8 * j + pair, byte = col / 64 * kBox + key * 128 + ((col % 64 * 2) ^ (key % 8 * 16));
        const uint32_t w = *(const uint32_t*)((const uint8_t*)at + byte);
#pragma unroll
        for (int h = 0; h < 2; h++)
          if (key >= lo[h] && key < hi[h]) {
            if ((w & 0x7f80u) == 0x7f80u) sums[n][4 * j + 2 * h] = NAN;
            if ((w & 0x7f800000u) == 0x7f800000u) sums[n][4 * j + 2 * h + 1] = NAN;
          }
      }
  any_of(false);  // all have read
  for (int i = 0; i < chunks; i++) {
    uint4 v = at[threadIdx.x + 128 * i];
    uint32_t* words = (uint32_t*)&v;
    for (int k = 0; k < 4; k++) {
      if ((words[k] & 0x7f80u) == 0x7f80u) words[k] &= 0xffff0000u;
      if ((words[k] & 0x7f800000u) == 0x7f800000u) words[k] &= 0xffffu;
    }
    at[threadIdx.x + 128 * i] = v;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  any_of(false);
}

template <int halves>
__device__ __forceinline__ void attention(const void* queries, const void* ctx_keys, const void* ctx_values, const void* blk_keys,
                                          const void* blk_values, const int4* spans, const int2* rows_of_tiles, bf16* out,
                                          long long out_stride, int group, int per, float scale) {
  typedef Room<halves> Room;
  constexpr int kTiles = Room::tiles, kBoxes = Room::boxes, kTile = Room::tile, kDim = 128 * halves;
  const uint32_t base = shared_address(raw);
  if (base & 1023) __trap();
  const uint32_t tiles_at = base + kBoxes * kBox, bars = tiles_at + kTiles * kTile;
  const uint32_t full_q = bars, full_k = bars + 8, full_v = full_k + 8 * kTiles, empty = full_v + 8 * kTiles;
  const uint32_t verdict = empty + 8 * kTiles;
  volatile uint32_t* again = (uint32_t*)(raw + (verdict + 8 - base));
  const int2 mine = rows_of_tiles[gridDim.x - 1 - blockIdx.x];  // late rows see most: first
  const int row0 = mine.x, rows = mine.y, head = blockIdx.y;
  if (threadIdx.x == 0) {
    barrier_init(full_q, 1);
    barrier_init(verdict, 128);
    for (int s = 0; s < kTiles; s++) {
      barrier_init(full_k + 8 * s, 1);
      barrier_init(full_v + 8 * s, 1);
      barrier_init(empty + 8 * s, 128);
    }
    barriers_visible();
  }
  __syncthreads();
  const Reach reach = reach_of(spans, row0, rows);
  const int ctx_tiles = reach.ctx_tiles(), tiles = ctx_tiles + reach.blk_tiles();

  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128) {
      map_acquire(queries);
      barrier_expect(full_q, kBoxes * group * per * 128);
      for (int h = 0; h < group; h++)
        for (int b = 0; b < kBoxes; b++)
          copy_box(base + b * kBox + h * per * 128, queries, (head * group + h) * kDim + b * 64, row0, full_q);
      if (ctx_tiles > 0) map_acquire(ctx_keys), map_acquire(ctx_values);
      if (tiles > ctx_tiles) map_acquire(blk_keys), map_acquire(blk_values);
      int s = 0, phase = 1;
      for (int pass = 0;; pass++) {
        for (int i = 0; i < tiles; i++) {
          const bool ctx = i < ctx_tiles;
          const int key = ctx ? reach.ctx_lo + 64 * i : reach.blk_lo + 64 * (i - ctx_tiles);
          const void *k = ctx ? ctx_keys : blk_keys, *v = ctx ? ctx_values : blk_values;
          const uint32_t at = tiles_at + s * kTile;
          barrier_wait(empty + 8 * s, phase);
          barrier_expect(full_k + 8 * s, kBoxes * kBox);
          for (int b = 0; b < kBoxes; b++) copy_box(at + b * kBox, k, head * kDim + b * 64, key, full_k + 8 * s);
          barrier_expect(full_v + 8 * s, kBoxes * kBox);
          for (int b = 0; b < kBoxes; b++) copy_box(at + (kBoxes + b) * kBox, v, head * kDim + b * 64, key, full_v + 8 * s);
          if (++s == kTiles) s = 0, phase ^= 1;
        }
        barrier_wait(verdict, pass & 1);
        if (!*again) break;
      }
    }
    return;
  }

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, pair = 2 * (lane & 3);
  int4 span[2];
  int row[2], slot[2];  // of the thread's two rows of the products
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int m = warp * 16 + (lane >> 2) + 8 * h;
    row[h] = m % per, slot[h] = m / per;
    span[h] = row[h] < rows && slot[h] < group ? spans[row0 + row[h]] : make_int4(0, 0, 0, 0);
  }
  const float by = scale * 1.4426950408889634f;  // scores in bits
  float sums[halves][64], largest[2], total[2];
  bool masks = false, careful = false;

  float s[32];
  // scores starts the product of the queries with the keys of a tile, which
  // lies in stage at for the turn'th time.
  auto scores = [&](int at, int turn) {
    const uint32_t keys = tiles_at + at * kTile;
    barrier_wait(full_k + 8 * at, turn & 1);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4 * kBoxes; k++) {
      const uint32_t to = (k >> 2) * kBox + (k & 3) * 32;
      wgmma_m64n64k16(s, rows_of(base + to), rows_of(keys + to), k != 0);
    }
    wgmma_commit();
  };
  // attend turns the scores of tile i into weights and starts their product
  // with the values.
  auto attend = [&](int i, int at, int turn) {
    const bool ctx = i < ctx_tiles;
    const int key = ctx ? reach.ctx_lo + 64 * i : reach.blk_lo + 64 * (i - ctx_tiles);
    const bool cut = ctx ? key < reach.ctx_from || key + 64 > reach.ctx_to : key < reach.blk_from || key + 64 > reach.blk_to;
    int lo[2], hi[2];
    masks |= cut;
    if (cut) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        lo[h] = (ctx ? span[h].x : span[h].z) - key, hi[h] = (ctx ? span[h].y : span[h].w) - key;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            if (8 * j + pair + e < lo[h] || 8 * j + pair + e >= hi[h]) s[4 * j + 2 * h + e] = -INFINITY;
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
      for (int n = 0; n < halves; n++)
#pragma unroll
        for (int j = 0; j < 16; j++) sums[n][4 * j + 2 * h] *= keep, sums[n][4 * j + 2 * h + 1] *= keep;
    }
    const uint32_t values = tiles_at + at * kTile + kBoxes * kBox;
    barrier_wait(full_v + 8 * at, turn & 1);
    if (careful && cut) isolate<halves>(values, lo, hi, sums);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int n = 0; n < halves; n++)
        wgmma_m64n128k16_columns(sums[n], p + 4 * k, columns_of(values + 2 * n * kBox + k * 2048, kBox), 1);
    wgmma_commit();
  };

  barrier_wait(full_q, 0);
  int at = 0, turn = 0;
  for (bool redo = true; redo; careful = true) {
#pragma unroll
    for (int n = 0; n < halves; n++)
#pragma unroll
      for (int i = 0; i < 64; i++) sums[n][i] = 0;
    largest[0] = largest[1] = -INFINITY, total[0] = total[1] = 0;
    if (tiles > 0) {
      scores(at, turn);
      wgmma_wait<0>();
      held(s);
      for (int i = 0; i + 1 < tiles; i++) {
        attend(i, at, turn);
        const int was = at;
        if (++at == kTiles) at = 0, turn++;
        scores(at, turn);
        wgmma_wait<0>();
        held(s);
#pragma unroll
        for (int n = 0; n < halves; n++) held(sums[n]);
        barrier_arrive(empty + 8 * was);
      }
      attend(tiles - 1, at, turn);
      wgmma_wait<0>();
#pragma unroll
      for (int n = 0; n < halves; n++) held(sums[n]);
      barrier_arrive(empty + 8 * at);
      if (++at == kTiles) at = 0, turn++;
    }
    bool bad = false;
#pragma unroll
    for (int n = 0; n < halves; n++)
#pragma unroll
      for (int i = 0; i < 64; i++) bad |= sums[n][i] != sums[n][i] && row[i / 2 % 2] < rows && slot[i / 2 % 2] < group;
    redo = masks && !careful && any_of(bad);
    if (threadIdx.x == 0) *again = redo;
    barrier_arrive(verdict);
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float all = quad_sum(total[h]);
    if (row[h] >= rows || slot[h] >= group) continue;
    const bool sees = span[h].x < span[h].y || span[h].z < span[h].w;
    const float inverse = sees ? 1 / all : 0;
    bf16* to = out + (row0 + row[h]) * out_stride + (head * group + slot[h]) * kDim + pair;
#pragma unroll
    for (int n = 0; n < halves; n++)
#pragma unroll
      for (int j = 0; j < 16; j++)
        *(uint32_t*)(to + n * 128 + 8 * j) = pack(sums[n][4 * j + 2 * h] * inverse, sums[n][4 * j + 2 * h + 1] * inverse);
  }
}

#define ATTENTION(name, halves, blocks)                                                                                       \
  extern "C" __global__ void __launch_bounds__(160, blocks)                                                                   \
      name(const void* queries, const void* ctx_keys, const void* ctx_values, const void* blk_keys, const void* blk_values,   \
           const int4* spans, const int2* tiles, bf16* out, long long out_stride, long long group, long long per,             \
           double scale) {                                                                                                    \
    attention<halves>(queries, ctx_keys, ctx_values, blk_keys, blk_values, spans, tiles, out, out_stride, (int)group,         \
                      (int)per, (float)scale);                                                                                \
  }

ATTENTION(fast_attention_128, 1, 2)
ATTENTION(fast_attention_256, 2, 1)
