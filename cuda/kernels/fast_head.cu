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
#include "fast_sm90.cuh"
#include "fast_wgmma.cuh"

extern __shared__ uint8_t raw[];

enum Mode { kPlain, kBoth, kMixture };

constexpr int kRows = 128;    // rows of a block's tile
constexpr int kStages = 4;    // parts of 64 values of the sum under way
constexpr int kStage = 6 * kBox;
constexpr int kAhead = 12;    // steps that the weight is asked for before it is needed
constexpr int kInserters = 96;
constexpr int kQueue = 8 * kInserters;

// Candidate is a place of the queue. Its word is 0 while it is free; turn is
// how often it was emptied.
struct Candidate {
  u64 word;
  int row, turn;
};

struct Queue {
  Candidate at[kQueue];
  unsigned taken;  // places given out so far
  unsigned ended;  // warps that will ask for none any more
};

constexpr int kHeadShared = kStages * kStage + 1024 + 64 + (int)sizeof(Queue);
constexpr float kLog2e = 1.4426950408889634f;

// vocab_tile is the number of logits of a row in a tile.
template <Mode mode>
__host__ __device__ constexpr int vocab_tile() {
  return mode == kPlain ? 256 : 128;
}

struct HeadParts {
  float2* draft;      // [tiles, M]: largest logit, Σ exp(logit - largest)
  float4* target;     // [tiles, M]: the same of the target, Σ p̃·(t-d), Σ q̃·(d-t)
  float2* mixture;    // [tiles, M]: Σ of JSD's terms in bits, Σ min(p, q)
  u64* best;          // [M, K] words, largest first
  unsigned* ranks;    // [M]
  const int* labels;  // [M] or null
  const float* label_logit;
  const float* lse;   // [M] of both, for the mixture
  const float* target_lse;
  int rows, vocab, k;
};

// A word of best orders logits as the results do: by value (NaN like -Inf),
// then by lowest id. Its last bit remembers a NaN.
__device__ __forceinline__ u64 word_of(float v, int id) {
  bool nan = v != v;
  int bits = __float_as_int(nan ? -INFINITY : v + 0.0f);
  unsigned ordered = bits < 0 ? ~bits : bits | 0x80000000u;
  return (u64)ordered << 32 | (unsigned)(~id << 1) | (nan ? 1u : 0u);
}

__device__ __forceinline__ float value_of(u64 word) {
  unsigned ordered = word >> 32;
  if (word == 0) return -INFINITY;  // nothing here yet
  return __int_as_float(ordered & 0x80000000u ? (int)(ordered & 0x7fffffffu) : ~(int)ordered);
}

__device__ __forceinline__ int id_of(u64 word) { return ~((unsigned)word >> 1) & 0x7fffffff; }

__device__ __forceinline__ u64 load_now(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

// insert puts a word among the k best of a row, if it belongs there. Blocks
// insert at the same time: each place keeps the larger of what it holds and
// what comes, and hands the other on, so that the places end up sorted in any
// order of arrival. It returns whether the word was better than the worst.
__device__ bool insert(u64* best, int k, u64 word) {
  if (load_now(best + k - 1) >= word) return false;
  int at = 0;
  for (; at + 4 <= k; at += 4) {
    u64 w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = load_now(best + at + i);
    int n = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) n += w[i] > word;
    if (n < 4) {
      at += n;
      break;
    }
  }
  for (; at < k && word != 0; at++) word = min(word, atomicMax(best + at, word));
  return true;
}

// enqueue hands a word of a row to the inserting warps. It waits while the
// queue is full.
__device__ void enqueue(Queue* q, u64 word, int row) {
  unsigned n = atomicAdd(&q->taken, 1u);
  Candidate* c = &q->at[n % kQueue];
  while (atomicAdd(&c->turn, 0) != (int)(n / kQueue)) __nanosleep(100);
  atomicExch(&c->row, row);
  __threadfence_block();
  atomicExch(&c->word, word);
}

// drain inserts what comes in at this thread's places of the queue until the
// multiplying warps have ended.
__device__ void drain(Queue* q, u64* best, int k, unsigned lane) {
  for (unsigned n = lane;;) {
    Candidate* c = &q->at[n % kQueue];
    u64 word = atomicExch(&c->word, 0ull);
    if (word != 0) {
      __threadfence_block();
      int row = atomicAdd(&c->row, 0);
      __threadfence_block();
      atomicAdd(&c->turn, 1);
      insert(best + (size_t)row * k, k, word);
      n += kInserters;
    } else {
      // A warp ends after its words are in place.
      if (atomicAdd(&q->ended, 0u) == 8 && atomicAdd(&q->taken, 0u) <= n) return;
      __nanosleep(400);
    }
  }
}

// keep_best offers the logits of one row of a tile to its best K: no more than
// K of them, those of at least worst. 2·columns logits are in this lane, at
// columns 8j + 2·(lane%4) + e after col; they are used up. largest is the
// quad's, nan says that one of them is NaN.
template <int columns, int half>
__device__ __forceinline__ void keep_best(float (&acc)[4 * columns], Queue* queue, int row, int k, bool wanted, bool nan, float largest,
                                          u64 worst, int col) {
  const int lane = threadIdx.x & 31, pair = 2 * (lane & 3), leader = lane & ~3;
  constexpr int none = 1 << 30;
  if (__any_sync(~0u, wanted && nan)) {
    // Rare: compare whole words, each round those below the last.
    bool going = wanted && nan;
    u64 last = ~0ull;
    for (int n = 0; n < k && __any_sync(~0u, going); n++) {
      u64 next = 0;
#pragma unroll
      for (int j = 0; j < columns; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          u64 w = word_of(acc[4 * j + 2 * half + e], col + 8 * j + pair + e);
          if (w < last && w > next) next = w;
        }
      next = last = quad_max(next);
      going = going && next > worst;
      if (going && lane == leader) enqueue(queue, next, row);
    }
  }
  const float least = value_of(worst);
  bool going = wanted && !nan;
  for (int n = 0; n < k && __any_sync(~0u, going); n++) {
    int c = none;
#pragma unroll
    for (int j = columns - 1; j >= 0; j--)
#pragma unroll
      for (int e = 1; e >= 0; e--)
        if (acc[4 * j + 2 * half + e] == largest) c = 8 * j + e;
    c = quad_min(c == none ? none : c + pair);
    going = going && c != none;
    if (going && lane == leader) enqueue(queue, word_of(largest, col + c), row);
    largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < columns; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& v = acc[4 * j + 2 * half + e];
        if (8 * j + e + pair == c) v = NAN;  // taken; NaN is passed over from here on
        largest = fmaxf(largest, v);
      }
    largest = quad_max(largest);
    going = going && largest >= least;
  }
}

// count_before counts the logits of one row of a tile that rank before the
// label's. value is the label's logit, label its id.
template <int columns, int half>
__device__ __forceinline__ int count_before(const float (&acc)[4 * columns], float value, int label, int col) {
  constexpr int width = 8 * columns;
  const int pair = 2 * (threadIdx.x & 3);
  int n = 0;
  bool apart = label < col || label >= col + width;
  if (__all_sync(~0u, apart && value > -INFINITY)) {
    // Equal ones count where their ids are lower: the whole tile or none of it.
    float above = value;
    if (label >= col + width) {  // at least value: above the float below it
      int bits = __float_as_int(value + 0.0f);
      above = bits == 0 ? __int_as_float(0x80000001) : __int_as_float(bits > 0 ? bits - 1 : bits + 1);
    }
#pragma unroll
    for (int j = 0; j < columns; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) n += acc[4 * j + 2 * half + e] > above;
    return n;
  }
  float own = value != value ? -INFINITY : value;
#pragma unroll
  for (int j = 0; j < columns; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float v = acc[4 * j + 2 * half + e];
      int id = col + 8 * j + pair + e;
      if (v != v) v = -INFINITY;
      n += v > own || (v == own && id < label);
    }
  return n;
}

// RowState is what reducing a row needs from memory.
struct RowState {
  u64 worst;  // the K-th best so far, 0 while there are fewer
  int label;
  float label_logit, lse, target_lse;
};

template <Mode mode>
__device__ __forceinline__ RowState row_state(const HeadParts& out, int row) {
  RowState r = {0, -1, 0, 0, 0};
  if (row >= out.rows) return r;
  if (mode == kMixture) {
    r.lse = out.lse[row] * kLog2e, r.target_lse = out.target_lse[row] * kLog2e;
    return r;
  }
  if (out.k > 0) r.worst = load_now(out.best + (size_t)row * out.k + out.k - 1);
  if (out.labels) r.label = out.labels[row], r.label_logit = out.label_logit[row];
  return r;
}

// reduce_half reduces one row's logits of a tile: half 0 is the thread's first
// row, half 1 the one 8 further down.
template <Mode mode, int columns, int half>
__device__ __forceinline__ void reduce_half(float (&acc)[4 * columns], float (&tar)[4 * columns], const HeadParts& out, const RowState& state,
                                            Queue* queue, int row, int tile) {
  constexpr int width = 8 * columns;
  const int lane = threadIdx.x & 31, pair = 2 * (lane & 3), col = tile * width;
  const bool valid = row < out.rows, first = (lane & 3) == 0;
  const size_t part = (size_t)tile * out.rows + row;
  if (mode == kMixture) {
    const float lq = state.lse, lp = state.target_lse;
    float jsd = 0, common = 0;
#pragma unroll
    for (int j = 0; j < columns; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float b = fmaf(acc[4 * j + 2 * half + e], kLog2e, -lq), a = fmaf(tar[4 * j + 2 * half + e], kLog2e, -lp);
        float q = exp2_fast(b), p = exp2_fast(a), m = 0.5f * (p + q);
        float lm = __log2f(m);
        if (col + 8 * j + pair + e < out.vocab && !(m == 0)) {
          jsd += (p == 0 ? 0 : p * (a - lm)) + (q == 0 ? 0 : q * (b - lm));
          common += p != p || q != q ? p + q : fminf(p, q);
        }
      }
    jsd = quad_sum(jsd);
    common = quad_sum(common);
    if (valid && first) out.mixture[part] = make_float2(0.5f * jsd, common);
    return;
  }
  const int label = state.label;
  const float label_logit = state.label_logit;
  const bool ragged = col + width > out.vocab;
  if (ragged) {
#pragma unroll
    for (int j = 0; j < columns; j++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (col + 8 * j + pair + e >= out.vocab) acc[4 * j + 2 * half + e] = tar[4 * j + 2 * half + e] = -INFINITY;
  }
  float largest = -INFINITY;
#pragma unroll
  for (int j = 0; j < columns; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) largest = fmaxf(largest, acc[4 * j + 2 * half + e]);
  largest = quad_max(largest);
  const float shift = largest == -INFINITY ? 0 : largest * kLog2e;
  float sum = 0;
  if (mode == kPlain) {
    float s[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < columns; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) s[e] += exp2_fast(fmaf(acc[4 * j + 2 * half + e], kLog2e, -shift));
    sum = quad_sum(s[0] + s[1]);
  } else {
    float top = -INFINITY;
#pragma unroll
    for (int j = 0; j < columns; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) top = fmaxf(top, tar[4 * j + 2 * half + e]);
    top = quad_max(top);
    const float up = top == -INFINITY ? 0 : top * kLog2e;
    float tsum = 0, cross = 0, back = 0;
#pragma unroll
    for (int j = 0; j < columns; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float d = acc[4 * j + 2 * half + e], t = tar[4 * j + 2 * half + e];
        float q = exp2_fast(fmaf(d, kLog2e, -shift)), p = exp2_fast(fmaf(t, kLog2e, -up)), by = t - d;
        if (ragged && col + 8 * j + pair + e >= out.vocab) by = 0;
        sum += q;
        tsum += p;
        cross = fmaf(p, by, cross);
        back = fmaf(q, by, back);
      }
    sum = quad_sum(sum);
    tsum = quad_sum(tsum);
    cross = quad_sum(cross);
    back = quad_sum(back);
    if (valid && first) out.target[part] = make_float4(top, tsum, cross, -back);
  }
  if (valid && first) out.draft[part] = make_float2(largest, sum);
  const bool nan = sum != sum;
  // Past the end of the vocabulary stand NaN from here on: they rank nowhere.
  if (ragged && !nan) {
#pragma unroll
    for (int j = 0; j < columns; j++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (col + 8 * j + pair + e >= out.vocab) acc[4 * j + 2 * half + e] = NAN;
  }
  bool counts = label >= 0 && (largest >= label_logit || nan || !(label_logit > -INFINITY));
  if (__any_sync(~0u, counts)) {
    int n = count_before<columns, half>(acc, label_logit, label, col);
    n = quad_sum(counts ? n : 0);
    if (n > 0 && first && valid) atomicAdd(out.ranks + row, (unsigned)n);
  }
  if (out.k > 0) {
    bool wanted = valid && (nan || largest >= value_of(state.worst));
    if (__any_sync(~0u, wanted)) keep_best<columns, half>(acc, queue, row, out.k, wanted, nan, largest, state.worst, col);
  }
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
      if (it.tile < tiles) {
        reduce_half<mode, width / 8, 0>(acc, tar, out, upper, queue, row, it.tile);
        reduce_half<mode, width / 8, 1>(acc, tar, out, lower, queue, row + 8, it.tile);
      }
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
