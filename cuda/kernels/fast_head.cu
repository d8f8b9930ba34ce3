// The head without logits, for sm_90a: hidden [M,H] times the vocabulary head
// [V,H] transposed, bf16 in, float32 sums, reduced row by row as the product
// comes out of the tensor cores. What stays of a tile of logits is its largest
// value and its sum of exponentials; the K best logits of a row live in K words
// of global memory; the rank of the label is a counter.
//
//   fast_head_begin    logits of the labels, the words and counters set to 0
//   fast_head          the product and its reduction (fast_head_both: with a
//                      second product, the target's logits, for KL and RKL;
//                      fast_head_mixture: a second pass for JSD and TV)
//   fast_head_merge    one row's parts to its results (fast_head_mixture_merge)
//
// A row's numbers do not depend on the rows beside it: its parts belong to
// fixed tiles of the vocabulary and are summed in fixed order; the best K of a
// set and a count do not depend on order.
//
// Grid of the products: 2·(SMs/2) blocks of 384 threads, clusters of two. Two
// warpgroups multiply, one brings boxes. Work is dealt out vocabulary first, so
// that all blocks read the same part of the weight at the same time: it comes
// from memory once, and the hidden rows stay in the L2 cache. A cluster either
// takes two tiles of 128 rows and one of the vocabulary, or, for the last of an
// odd number of row tiles, one tile of rows and two of the vocabulary; what the
// two blocks share comes from L2 once, each block bringing half of it to both.
// As all blocks stand at the same place of the weight, each of them would wait
// for memory at every step: whoever has a tile's first rows asks for its weight
// kAhead steps before.
//
// Logits that may be among the best K are rare after the first tiles, but
// inserting one takes microseconds of round trips to L2. The multiplying warps
// only put them in a queue in shared memory; three warps beside the copying
// one insert them.
//
// H is a multiple of 8, rows are dense, maps are tensor maps of boxes of 64 x 64
// with the 128-byte swizzle. Arguments are 8 bytes each.
#include "fast_head_row.cuh"
#include "fast_sm90.cuh"
#include "fast_wgmma.cuh"

extern __shared__ __align__(1024) uint8_t raw[];

constexpr int kRows = 128;    // rows of a block's tile
constexpr int kStages = 4;    // parts of 64 values of the sum under way
constexpr int kStage = 6 * kBox;
constexpr int kAhead = 12;    // steps that the weight is asked for before it is needed
constexpr int kHeadShared = kStages * kStage + 1024 + 64 + (int)sizeof(Queue);

// vocab_tile is the number of logits of a row in a tile.
template <Mode mode>
__host__ __device__ constexpr int vocab_tile() {
  return mode == kPlain ? 256 : 128;
}

// item says which tiles the blocks of a cluster take at one turn.
struct HeadItem {
  int row_tile, tile;
  bool same_rows;  // both blocks have these rows, each its own vocabulary
};

__device__ __forceinline__ HeadItem head_item(int i, int row_tiles, int rank) {
  int pairs = row_tiles >> 1, two = i / row_tiles, j = i - two * row_tiles;
  HeadItem it;
  it.same_rows = j >= 2 * pairs;
  if (it.same_rows) {
    it.row_tile = row_tiles - 1;
    it.tile = 2 * two + rank;
  } else {
    int second = j >= pairs;
    it.tile = 2 * two + second;
    it.row_tile = 2 * (j - (second ? pairs : 0)) + rank;
  }
  return it;
}

template <Mode mode>
__device__ __forceinline__ void head_body(const void* hidden, const void* target, const void* weight, const HeadParts& out, int depth) {
  constexpr int width = vocab_tile<mode>();
  constexpr int a_boxes = mode == kPlain ? 2 : 4, b_boxes = 6 - a_boxes;
  const uint32_t base = (shared_address(raw) + 1023) & ~1023u;
  const uint32_t full = base + kStages * kStage, empty = full + 8 * kStages;
  Queue* queue = (Queue*)(raw + (base - shared_address(raw)) + kStages * kStage + 64);
  const int rank = cluster_rank(), group = threadIdx.x >> 7;
  const int row_tiles = (out.rows + kRows - 1) / kRows, tiles = (out.vocab + width - 1) / width;
  const int items = (tiles + 1) / 2 * row_tiles, clusters = gridDim.x >> 1;
  const int steps = (depth + 63) / 64;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 4);  // two warpgroups of each block
    }
    barriers_visible();
    queue->taken = queue->ended = 0;
  }
  for (int i = threadIdx.x; i < kQueue; i += blockDim.x) queue->at[i].word = 0, queue->at[i].turn = 0;
  __syncthreads();
  cluster_sync();

  if (group == 2) {
    fewer_registers<40>();
    if (threadIdx.x == 256) {
      map_acquire(hidden);
      map_acquire(weight);
      if (mode != kPlain) map_acquire(target);
      // ahead walks over the same steps, kAhead before the copies.
      int ahead = blockIdx.x >> 1, ahead_step = 0;
      HeadItem next = head_item(ahead, row_tiles, rank);
      auto ask = [&] {
        if (ahead >= items) return;
        if (ahead_step == steps) {
          ahead_step = 0;
          do {
            ahead += clusters;
            if (ahead >= items) return;
            next = head_item(ahead, row_tiles, rank);
          } while (!next.same_rows && next.tile >= tiles);
        }
        const int word = next.tile * width, col = 64 * ahead_step++;
        if (next.same_rows) {
          if (row_tiles > 1) return;  // others have asked
#pragma unroll
          for (int n = 0; n < b_boxes; n++) prefetch_box(weight, col, word + 64 * n);
        } else if (next.row_tile < 2) {
#pragma unroll
          for (int n = 0; n < b_boxes / 2; n++) prefetch_box(weight, col, word + 64 * (rank * (b_boxes / 2) + n));
        }
      };
      for (int n = 0; n < kAhead; n++) ask();
      int s = 0, phase = 0;
      for (int i = blockIdx.x >> 1; i < items; i += clusters) {
        HeadItem it = head_item(i, row_tiles, rank);
        if (!it.same_rows && it.tile >= tiles) continue;
        const int row = it.row_tile * kRows, word = it.tile * width;
        for (int step = 0; step < steps; step++) {
          ask();
          barrier_wait(empty + 8 * s, phase ^ 1);
          const uint32_t bar = full + 8 * s, a = base + s * kStage, b = a + a_boxes * kBox;
          barrier_expect(bar, kStage);
          const int col = step * 64;
          if (it.same_rows) {
            copy_box_both(a + rank * kBox, hidden, col, row + 64 * rank, bar);
            if (mode != kPlain) copy_box_both(a + (2 + rank) * kBox, target, col, row + 64 * rank, bar);
#pragma unroll
            for (int n = 0; n < b_boxes; n++) copy_box(b + n * kBox, weight, col, word + 64 * n, bar);
          } else {
#pragma unroll
            for (int n = 0; n < b_boxes / 2; n++) {
              int at = rank * (b_boxes / 2) + n;
              copy_box_both(b + at * kBox, weight, col, word + 64 * at, bar);
            }
#pragma unroll
            for (int n = 0; n < 2; n++) {
              copy_box(a + n * kBox, hidden, col, row + 64 * n, bar);
              if (mode != kPlain) copy_box(a + (2 + n) * kBox, target, col, row + 64 * n, bar);
            }
          }
          if (++s == kStages) s = 0, phase ^= 1;
        }
      }
    } else if (mode != kMixture && threadIdx.x >= 288 && out.k > 0) {
      drain(queue, out.best, out.k, threadIdx.x - 288);
    }
  } else {
    more_registers<232>();
    const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    const bool signals = lane == 0 && warp < 2;  // warp 0 tells block 0, warp 1 block 1
    int s = 0, phase = 0;
    float acc[vocab_tile<mode>() / 2];
    float tar[vocab_tile<mode>() / 2];
    for (int i = blockIdx.x >> 1; i < items; i += clusters) {
      HeadItem it = head_item(i, row_tiles, rank);
      if (!it.same_rows && it.tile >= tiles) continue;
      int before = 0;
      for (int step = 0; step < steps; step++) {
        barrier_wait(full + 8 * s, phase);
        const uint32_t at = base + s * kStage;
        const uint64_t a = rows_of(at + group * kBox), b = rows_of(at + a_boxes * kBox);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) {
          if constexpr (mode == kPlain) {
            wgmma_m64n256k16(acc, a + 2 * k, b + 2 * k, (step | k) != 0);
          } else {
            wgmma_m64n128k16(acc, a + 2 * k, b + 2 * k, (step | k) != 0);
            wgmma_m64n128k16(tar, a + 2 * k + (2 * kBox >> 4), b + 2 * k, (step | k) != 0);
          }
        }
        wgmma_commit();
        if (step > 0) {
          wgmma_wait<1>();
          if (signals) barrier_arrive_at(empty + 8 * before, warp);
        }
        before = s;
        if (++s == kStages) s = 0, phase ^= 1;
      }
      const int row = it.row_tile * kRows + group * 64 + warp * 16 + (lane >> 2);
      const RowState upper = row_state<mode>(out, row), lower = row_state<mode>(out, row + 8);
      wgmma_wait<0>();
      held(acc);
      if (mode != kPlain) held(tar);
      if (signals) barrier_arrive_at(empty + 8 * before, warp);
      if (it.tile < tiles) reduce_rows<mode, width / 8>(acc, tar, out, upper, lower, queue, it.tile);
    }
    __syncwarp();
    if (lane == 0) atomicAdd(&queue->ended, 1u);
  }
  __syncwarp();
  cluster_sync();  // no block leaves while the other still writes to it
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    fast_head(const void* hidden, const void* weight, float2* draft, u64* best, unsigned* ranks, const int* labels,
              const float* label_logit, long long rows, long long vocab, long long depth, long long k) {
  HeadParts out = {draft, nullptr, nullptr, best, ranks, labels, label_logit, nullptr, nullptr, (int)rows, (int)vocab, (int)k};
  head_body<kPlain>(hidden, nullptr, weight, out, (int)depth);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    fast_head_both(const void* hidden, const void* target, const void* weight, float2* draft, float4* parts, u64* best,
                   unsigned* ranks, const int* labels, const float* label_logit, long long rows, long long vocab, long long depth,
                   long long k) {
  HeadParts out = {draft, parts, nullptr, best, ranks, labels, label_logit, nullptr, nullptr, (int)rows, (int)vocab, (int)k};
  head_body<kBoth>(hidden, target, weight, out, (int)depth);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    fast_head_mixture(const void* hidden, const void* target, const void* weight, float2* mixture, const float* lse,
                      const float* target_lse, long long rows, long long vocab, long long depth) {
  HeadParts out = {nullptr, nullptr, mixture, nullptr, nullptr, nullptr, nullptr, lse, target_lse, (int)rows, (int)vocab, 0};
  head_body<kMixture>(hidden, target, weight, out, (int)depth);
}

// fast_head_begin sets best and ranks to 0 and multiplies each row with its
// label's row of the weight, in the order of fast_head's sums, so that the
// label's logit here is the one there to the bit. Blocks of 128 threads, one
// for 8 rows and their 8 labels, of whose products the diagonal counts; labels
// may be null.
constexpr int kBeginRows = 8;
constexpr int kBeginStages = 8;
constexpr int kBeginBox = kBeginRows * 128;    // 8 rows of 64 values
constexpr int kBeginStage = 2 * 4 * kBeginBox;  // 256 values of the sum, both operands
constexpr int kBeginShared = kBeginStages * kBeginStage + 1024;

extern "C" __global__ void __launch_bounds__(128)
    fast_head_begin(const bf16* hidden, const bf16* weight, const int* labels, float* label_logit, u64* best, unsigned* ranks,
                    long long rows, long long depth, long long k) {
  const uint32_t base = (shared_address(raw) + 1023) & ~1023u;
  const int t = threadIdx.x, row0 = blockIdx.x * kBeginRows;
  for (long long i = t; i < kBeginRows * k; i += 128)
    if (row0 * k + i < rows * k) best[row0 * k + i] = 0;
  if (t < kBeginRows && row0 + t < rows) ranks[row0 + t] = 0;
  if (labels == nullptr) return;

  // Each thread brings 16 bytes of a row at two places of both operands.
  const int r = t >> 4, chunk = t & 15;
  const long long row = min((long long)(row0 + r), rows - 1);
  const bf16* from[2] = {hidden + row * depth, weight + (long long)max(labels[row], 0) * depth};
  const int steps = (int)((depth + 255) / 256);
  auto bring = [&](int step) {
    if (step < steps) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int at = chunk + 16 * (i & 1), col = step * 256 + at * 8, bytes = col < depth ? 16 : 0;  // zeros past the end
        uint32_t to = base + (step % kBeginStages) * kBeginStage + ((i >> 1) * 4 + (at >> 3)) * kBeginBox + r * 128 + (((at & 7) ^ r) << 4);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from[i >> 1] + (bytes ? col : 0)), "r"(bytes) : "memory");
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  for (int i = 0; i < kBeginStages - 1; i++) bring(i);
  // The 64 rows of a product are these 8 again and again: row groups 0 bytes apart.
  const uint64_t again = ~((uint64_t)0x3fff << 32);
  float acc[4];
  for (int step = 0; step < steps; step++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kBeginStages - 2) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const uint32_t at = base + (step % kBeginStages) * kBeginStage;
    wgmma_begin();
#pragma unroll
    for (int n = 0; n < 16; n++)
      wgmma_m64n8k16(acc, (rows_of(at + (n >> 2) * kBeginBox) & again) + 2 * (n & 3), rows_of(at + (4 + (n >> 2)) * kBeginBox) + 2 * (n & 3),
                     (step | n) != 0);
    wgmma_commit();
    bring(step + kBeginStages - 1);  // over the stage of the step before, which all have left
    wgmma_wait<0>();
    held(acc);
  }
  const int mine = t >> 2;
  if (t < 32 && mine >> 1 == (t & 3) && row0 + mine < rows) label_logit[row0 + mine] = labels[row0 + mine] < 0 ? NAN : mine & 1 ? acc[1] : acc[0];
}

// --- one row's parts to its results ---
// Blocks of 16 x 32 threads: 16 rows, 32 slices of the tiles. A slice takes
// every 32nd tile; slices are then added one after the other.

constexpr int kMergeRows = 16, kSlices = 32;

__device__ __forceinline__ float slices_max(float v, float (*shared)[kMergeRows]) {
  shared[threadIdx.y][threadIdx.x] = v;
  __syncthreads();
  float m = -INFINITY;
  for (int i = 0; i < kSlices; i++) m = fmaxf(m, shared[i][threadIdx.x]);
  __syncthreads();
  return m;
}

__device__ __forceinline__ double slices_sum(double v, double (*shared)[kMergeRows]) {
  shared[threadIdx.y][threadIdx.x] = v;
  __syncthreads();
  double s = 0;
  for (int i = 0; i < kSlices; i++) s += shared[i][threadIdx.x];
  __syncthreads();
  return s;
}

// fast_head_merge writes lse, the best K, label ranks and, where the parts of
// the target are given, target_lse, kl and rkl (each may be null). Rows whose
// target_rows is -1 get NaN. tiles is the number of vocabulary tiles.
extern "C" __global__ void __launch_bounds__(kMergeRows* kSlices)
    fast_head_merge(const float2* draft, const float4* target, const u64* best, const unsigned* ranks, const int* labels,
                    const int* target_rows, float* lse, int* top_ids, float* top_logits, int* label_rank, float* target_lse,
                    float* kl, float* rkl, long long rows, long long tiles, long long k) {
  __shared__ float maxima[kSlices][kMergeRows];
  __shared__ double sums[kSlices][kMergeRows];
  const long long row = blockIdx.x * kMergeRows + threadIdx.x;
  const bool valid = row < rows, writes = valid && threadIdx.y == 0;
  float top = -INFINITY;
  if (valid) {
#pragma unroll 8
    for (long long t = threadIdx.y; t < tiles; t += kSlices) top = fmaxf(top, draft[t * rows + row].x);
  }
  top = slices_max(top, maxima);
  double sum = 0;
  if (valid) {
#pragma unroll 8
    for (long long t = threadIdx.y; t < tiles; t += kSlices) {
      float2 p = draft[t * rows + row];
      sum += (double)(p.y * exp2f((p.x - top) * kLog2e));
    }
  }
  sum = slices_sum(sum, sums);
  const double own = (double)top + log(sum);
  if (writes) lse[row] = (float)own;
  if (target != nullptr) {
    float high = -INFINITY;
    if (valid) {
#pragma unroll 8
      for (long long t = threadIdx.y; t < tiles; t += kSlices) high = fmaxf(high, target[t * rows + row].x);
    }
    high = slices_max(high, maxima);
    double tsum = 0, cross = 0, back = 0;
    if (valid) {
#pragma unroll 4
      for (long long t = threadIdx.y; t < tiles; t += kSlices) {
        float4 p = target[t * rows + row];
        float up = exp2f((p.x - high) * kLog2e), down = exp2f((draft[t * rows + row].x - top) * kLog2e);
        tsum += (double)(p.y * up);
        cross += (double)(p.z * up);
        back += (double)(p.w * down);
      }
    }
    tsum = slices_sum(tsum, sums);
    cross = slices_sum(cross, sums);
    back = slices_sum(back, sums);
    if (writes) {
      const double other = (double)high + log(tsum);
      const bool lacks = target_rows != nullptr && target_rows[row] < 0;
      const double forward = cross / tsum - other + own, reverse = back / sum - own + other;
      if (target_lse) target_lse[row] = (float)other;
      // Divergences are not below 0, whatever the rounding; NaN stays.
      if (kl) kl[row] = lacks ? NAN : (float)(forward < 0 ? 0 : forward);
      if (rkl) rkl[row] = lacks ? NAN : (float)(reverse < 0 ? 0 : reverse);
    }
  }
  if (!writes) return;
  const int label = labels ? labels[row] : -1;
  int rank = label < 0 ? -1 : (int)ranks[row];
  for (int i = 0; i < k; i++) {
    u64 w = best[row * k + i];
    top_ids[row * k + i] = id_of(w);
    top_logits[row * k + i] = w & 1 ? NAN : value_of(w);
    if (label >= 0 && id_of(w) == label) rank = i;
  }
  if (label_rank) label_rank[row] = rank;
}

extern "C" __global__ void __launch_bounds__(kMergeRows* kSlices)
    fast_head_mixture_merge(const float2* mixture, const int* target_rows, float* jsd, float* tv, long long rows, long long tiles) {
  __shared__ double sums[kSlices][kMergeRows];
  const long long row = blockIdx.x * kMergeRows + threadIdx.x;
  double bits = 0, common = 0;
  if (row < rows) {
#pragma unroll 8
    for (long long t = threadIdx.y; t < tiles; t += kSlices) {
      float2 p = mixture[t * rows + row];
      bits += p.x;
      common += p.y;
    }
  }
  bits = slices_sum(bits, sums);
  common = slices_sum(common, sums);
  if (row >= rows || threadIdx.y != 0) return;
  const bool lacks = target_rows != nullptr && target_rows[row] < 0;
  const double nats = bits * 0.6931471805599453, apart = 1 - common;
  if (jsd) jsd[row] = lacks ? NAN : (float)(nats < 0 ? 0 : nats);
  if (tv) tv[row] = lacks ? NAN : (float)(apart < 0 ? 0 : apart);
}
