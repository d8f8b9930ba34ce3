// What becomes of a tile of logits in the registers of the multiplying warps:
// the reductions of fast_head.cu, row by row. See there.
#pragma once
#include "fast_sm90.cuh"

enum Mode { kPlain, kBoth, kMixture };

constexpr float kLog2e = 1.4426950408889634f;
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
// multiplying warps have ended. One lane of a warp asks whether there is
// anything: the others must not take shared memory's time from the products.
__device__ void drain(Queue* q, u64* best, int k, unsigned place) {
  const bool asks = (threadIdx.x & 31) == 0;
  for (unsigned n = place;;) {
    unsigned ended = 0, taken = 0;
    if (asks) ended = atomicAdd(&q->ended, 0u), taken = atomicAdd(&q->taken, 0u);
    ended = __shfl_sync(~0u, ended, 0);
    taken = __shfl_sync(~0u, taken, 0);
    const bool mine = (int)(taken - n) > 0;
    if (!__any_sync(~0u, mine)) {
      if (ended == 8) return;  // a warp ends after its words are in place
      __nanosleep(1000);
      continue;
    }
    if (mine) {
      Candidate* c = &q->at[n % kQueue];
      u64 word = atomicExch(&c->word, 0ull);  // 0 while it is on its way
      if (word != 0) {
        __threadfence_block();
        int row = atomicAdd(&c->row, 0);
        __threadfence_block();
        atomicAdd(&c->turn, 1);
        insert(best + (size_t)row * k, k, word);
        n += kInserters;
      }
    }
    __syncwarp();
  }
}

// RowState is what reducing a row needs from memory.
struct RowState {
  int row;    // -1 past the end
  u64 worst;  // the K-th best so far, 0 while there are fewer
  int label;
  float label_logit, lse, target_lse;
};

template <Mode mode>
__device__ __forceinline__ RowState row_state(const HeadParts& out, int row) {
  RowState r = {-1, 0, -1, 0, 0, 0};
  if (row >= out.rows) return r;
  r.row = row;
  if (mode == kMixture) {
    r.lse = out.lse[row] * kLog2e, r.target_lse = out.target_lse[row] * kLog2e;
    return r;
  }
  if (out.k > 0) r.worst = load_now(out.best + (size_t)row * out.k + out.k - 1);
  if (out.labels) r.label = out.labels[row], r.label_logit = out.label_logit[row];
  return r;
}

// keep_best offers the logits of one row of a tile to its best K: those that
// are at least worst, no more than K of them. 2·columns logits are in this lane,
// at columns 8j + 2·(lane%4) + e after col; they are used up. largest is the
// quad's; wanted says that it is at least worst, nan that one of them is NaN.
template <int columns, int half>
__device__ __forceinline__ void keep_best(float (&acc)[4 * columns], Queue* queue, int row, int k, bool wanted, bool nan, float largest,
                                          u64 worst, int col) {
  const int lane = threadIdx.x & 31, pair = 2 * (lane & 3), leader = lane & ~3;
  constexpr int none = 1 << 30;
  if (__any_sync(~0u, nan)) {
    // Rare: compare whole words, each round those below the last.
    bool going = nan;
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
  // One after the other, from the largest down. Mostly there is one.
  bool going = wanted && !nan;
  int count = 0;
#pragma unroll
  for (int j = 0; j < columns; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) count += acc[4 * j + 2 * half + e] >= least;
  count = quad_sum(count);
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
    going = going && n + 1 < count;
    if (!__any_sync(~0u, going)) break;
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

// Marks are the two logits that a row's are counted against.
struct Marks {
  float label;  // above it: before the label
  float best;   // at least it: maybe among the best K; NaN: none
  bool closely;  // the label must be compared id by id
};

// marks_of says what to count in a tile of width logits from col on.
__device__ __forceinline__ Marks marks_of(const RowState& state, int col, int width, int k) {
  Marks m = {INFINITY, k > 0 && state.row >= 0 ? value_of(state.worst) : NAN, false};
  if (state.label < 0) return m;
  if (!(state.label_logit > -INFINITY) || (state.label >= col && state.label < col + width)) {
    m.closely = true;
    return m;
  }
  m.label = state.label_logit;
  if (state.label >= col + width) {
    // Equal logits of lower ids count too: those above the float below.
    int bits = __float_as_int(state.label_logit + 0.0f);
    m.label = bits == 0 ? __int_as_float(0x80000001) : __int_as_float(bits > 0 ? bits - 1 : bits + 1);
  }
  return m;
}

// count_closely counts the logits of one row of a tile that rank before the
// label's, of equal ones those of lower ids.
template <int columns, int half>
__device__ __forceinline__ int count_closely(const float (&acc)[4 * columns], float own, int label, int col) {
  const int pair = 2 * (threadIdx.x & 3);
  int n = 0;
  if (own != own) own = -INFINITY;
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

// put_past writes v over the columns past the end of the vocabulary.
template <int columns>
__device__ __forceinline__ void put_past(float (&acc)[4 * columns], int end, float v) {
  const int pair = 2 * (threadIdx.x & 3);
#pragma unroll
  for (int j = 0; j < columns; j++)
#pragma unroll
    for (int e = 0; e < 2; e++)
      if (8 * j + pair + e >= end) acc[4 * j + e] = acc[4 * j + 2 + e] = v;
}

// finish_row does with one row what is left after the sums.
template <int columns, int half>
__device__ __forceinline__ void finish_row(float (&acc)[4 * columns], const HeadParts& out, const RowState& state, const Marks& marks,
                                           Queue* queue, int col, float largest, bool nan, float above) {
  const bool first = (threadIdx.x & 3) == 0;
  const bool closely = state.label >= 0 && (marks.closely || nan);
  int before = (int)above;
  if (__any_sync(~0u, closely)) {
    int n = count_closely<columns, half>(acc, state.label_logit, state.label, col);
    before = closely ? n : before;
  }
  before = quad_sum(before);
  if (before > 0 && first && state.label >= 0) atomicAdd(out.ranks + state.row, (unsigned)before);
  if (out.k > 0) {
    const bool wanted = largest >= marks.best;
    nan = nan && state.row >= 0;
    if (__any_sync(~0u, wanted || nan))
      keep_best<columns, half>(acc, queue, state.row, out.k, wanted, nan, largest, state.worst, col);
  }
}

// reduce_rows reduces the thread's two rows of a tile. The sums of exponentials
// are bound by the unit that makes them; the counts run in its shadow.
template <Mode mode, int columns>
__device__ __forceinline__ void reduce_rows(float (&acc)[4 * columns], float (&tar)[4 * columns], const HeadParts& out,
                                            const RowState& upper, const RowState& lower, Queue* queue, int tile) {
  constexpr int width = 8 * columns;
  const int pair = 2 * (threadIdx.x & 3), col = tile * width, end = out.vocab - col;
  const bool first = (threadIdx.x & 3) == 0;
  const size_t part = (size_t)tile * out.rows;
  if (mode == kMixture) {
    float jsd[2] = {0, 0}, common[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < columns; j++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const RowState& state = h ? lower : upper;
          float b = fmaf(acc[4 * j + 2 * h + e], kLog2e, -state.lse), a = fmaf(tar[4 * j + 2 * h + e], kLog2e, -state.target_lse);
          float q = exp2_fast(b), p = exp2_fast(a), m = 0.5f * (p + q);
          float lm = __log2f(m);
          if (8 * j + pair + e < end && !(m == 0)) {
            jsd[h] += (p == 0 ? 0 : p * (a - lm)) + (q == 0 ? 0 : q * (b - lm));
            common[h] += p != p || q != q ? p + q : fminf(p, q);
          }
        }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float bits = 0.5f * quad_sum(jsd[h]), shared = quad_sum(common[h]);
      const int row = h ? lower.row : upper.row;
      if (row >= 0 && first) out.mixture[part + row] = make_float2(bits, shared);
    }
    return;
  }
  if (end < width) {
    put_past<columns>(acc, end, -INFINITY);
    if (mode == kBoth) put_past<columns>(tar, end, -INFINITY);
  }
  float largest[2] = {-INFINITY, -INFINITY}, top[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int j = 0; j < columns; j++)
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        largest[h] = fmaxf(largest[h], acc[4 * j + 2 * h + e]);
        if (mode == kBoth) top[h] = fmaxf(top[h], tar[4 * j + 2 * h + e]);
      }
  Marks marks[2] = {marks_of(upper, col, width, out.k), marks_of(lower, col, width, out.k)};
  float shift[2], up[2], sum[2] = {0, 0}, tsum[2] = {0, 0}, cross[2] = {0, 0}, back[2] = {0, 0};
  float above[2] = {0, 0};
#pragma unroll
  for (int h = 0; h < 2; h++) {
    largest[h] = quad_max(largest[h]);
    shift[h] = largest[h] == -INFINITY ? 0 : largest[h] * kLog2e;
    if (mode == kBoth) {
      top[h] = quad_max(top[h]);
      up[h] = top[h] == -INFINITY ? 0 : top[h] * kLog2e;
    }
  }
  // Where no logit of a warp's rows is above a label, none is counted.
  auto sums = [&](bool counting) {
#pragma unroll
    for (int j = 0; j < columns; j++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float d = acc[4 * j + 2 * h + e];
          const float q = exp2_fast(fmaf(d, kLog2e, -shift[h]));
          sum[h] += q;
          if (mode == kBoth) {
            const float t = tar[4 * j + 2 * h + e], p = exp2_fast(fmaf(t, kLog2e, -up[h]));
            float by = t - d;
            if (end < width && 8 * j + pair + e >= end) by = 0;
            tsum[h] += p;
            cross[h] = fmaf(p, by, cross[h]);
            back[h] = fmaf(q, by, back[h]);
          }
          if (counting) above[h] += one_above(d, marks[h].label);
        }
  };
  if (__any_sync(~0u, largest[0] > marks[0].label || largest[1] > marks[1].label))
    sums(true);
  else
    sums(false);
  bool nan[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = h ? lower.row : upper.row;
    sum[h] = quad_sum(sum[h]);
    nan[h] = sum[h] != sum[h];
    if (mode == kBoth) {
      tsum[h] = quad_sum(tsum[h]);
      cross[h] = quad_sum(cross[h]);
      back[h] = quad_sum(back[h]);
      if (row >= 0 && first) out.target[part + row] = make_float4(top[h], tsum[h], cross[h], -back[h]);
    }
    if (row >= 0 && first) out.draft[part + row] = make_float2(largest[h], sum[h]);
  }
  // Past the end stand NaN from here on, which rank nowhere; in rows that hold
  // NaN themselves they rank last, as -Inf of ids past all others.
  if (end < width) {
    if (!nan[0] && !nan[1]) put_past<columns>(acc, end, NAN);
  }
  finish_row<columns, 0>(acc, out, upper, marks[0], queue, col, largest[0], nan[0], above[0]);
  finish_row<columns, 1>(acc, out, lower, marks[1], queue, col, largest[1], nan[1], above[1]);
}
