// DDTree for many blocks, a warp a block: see gpu/trees.go. Prefixes are popped
// one after another; the warp's lanes share the work of one pop, which is that
// of a heap with 32 children a node.
#include <stdint.h>

constexpr int ABSENT = -1, UNKNOWN = -2; // of a token: no candidate, not known
constexpr unsigned ALL = ~0u;

// A prefix, as its last step: the candidate's rank and the slot in place, and
// the node before it.
struct __align__(16) Prefix {
  uint64_t key; // the sum of log-probabilities, so that integers order as sums do
  int parent;
  int place;
};

__device__ inline int placed(int rank, int depth) { return rank << 12 | depth; }
__device__ inline int rank_of(int place) { return place >> 12; }
__device__ inline int depth_of(int place) { return place & 0xfff; }

__device__ inline uint64_t key_of(double logw) {
  const uint64_t bits = (uint64_t)__double_as_longlong(logw + 0.); // one zero
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}

__device__ inline double sum_of(uint64_t key) {
  return __longlong_as_double((long long)(key >> 63 ? key & ~(1ull << 63) : ~key));
}

__device__ inline Prefix from(Prefix p, int lane) {
  return {__shfl_sync(ALL, p.key, lane), __shfl_sync(ALL, p.parent, lane), __shfl_sync(ALL, p.place, lane)};
}

// Whether a's tuple of ranks comes before b's, a prefix before its extensions.
// Tuples are compared from their ends; nodes hold (parent, place).
__device__ bool smaller(const int2 *nodes, Prefix a, Prefix b) {
  int da = depth_of(a.place), db = depth_of(b.place);
  bool less = da < db;
  for (; da > db; da--) {
    const int2 n = nodes[a.parent];
    a.parent = n.x, a.place = n.y;
  }
  for (; db > da; db--) {
    const int2 n = nodes[b.parent];
    b.parent = n.x, b.place = n.y;
  }
  for (;;) {
    const int ra = rank_of(a.place), rb = rank_of(b.place);
    if (ra != rb)
      less = ra < rb;
    if (a.parent == b.parent)
      return less;
    const int2 n = nodes[a.parent], m = nodes[b.parent];
    a.parent = n.x, a.place = n.y;
    b.parent = m.x, b.place = m.y;
  }
}

__device__ inline bool before(const int2 *nodes, Prefix a, Prefix b) {
  return a.key > b.key || (a.key == b.key && smaller(nodes, a, b));
}

// Puts p in place of the best of n.
__device__ void replace(Prefix *heap, int n, Prefix p, const int2 *nodes) {
  const int lane = threadIdx.x;
  int hole = 0;
  while (32 * hole + 1 < n) {
    const int child = 32 * hole + 1 + lane;
    const Prefix mine = child < n ? heap[child] : Prefix{0, 0, 0};
    // The largest key, its upper half first.
    const unsigned hi = mine.key >> 32, lo = (unsigned)mine.key;
    const unsigned top = __reduce_max_sync(ALL, child < n ? hi : 0);
    const bool in = child < n && hi == top;
    const unsigned low = __reduce_max_sync(ALL, in ? lo : 0);
    unsigned among = __ballot_sync(ALL, in && lo == low);
    int owner = __ffs(among) - 1;
    Prefix best = from(mine, owner);
    for (among &= among - 1; among; among &= among - 1) { // equal sums
      const int other = __ffs(among) - 1;
      const Prefix q = from(mine, other);
      if (smaller(nodes, q, best)) {
        best = q;
        owner = other;
      }
    }
    if (!before(nodes, best, p))
      break;
    __syncwarp();
    if (lane == 0)
      heap[hole] = best;
    hole = 32 * hole + 1 + owner;
  }
  __syncwarp();
  if (lane == 0)
    heap[hole] = p;
  __syncwarp();
}

// Adds p to n others.
__device__ void push(Prefix *heap, int n, Prefix p, const int2 *nodes) {
  int hole = n;
  while (hole > 0) {
    const int up = (hole - 1) / 32;
    const Prefix above = heap[up];
    if (!before(nodes, p, above))
      break;
    __syncwarp();
    if (threadIdx.x == 0)
      heap[hole] = above;
    hole = up;
  }
  __syncwarp();
  if (threadIdx.x == 0)
    heap[hole] = p;
  __syncwarp();
}

// Grows the tree of block blockIdx.x from log-probabilities [depth, k], best
// first, and walks it by the ranks of the tokens that followed. walk gets the
// nodes on the path, 0 after them, and at [depth] the first child of the last
// where the next token is not known. nodes, of budget + 1 a block, gets each
// node's parent and place, and sums its log-probability if it is not null: then
// the whole tree is wanted. heaps is null where the frontier fits into shared
// memory, staged says that the log-probabilities do.
extern "C" __global__ void __launch_bounds__(32)
    trees(const float *logprobs, int k, int depth, const int *truths, int budget, int *walks, int2 *all_nodes,
          double *sums, int *counts, Prefix *heaps, int staged) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x;
  const long long block = blockIdx.x;
  const int room = budget + 2;
  Prefix *heap = heaps ? heaps + block * room : (Prefix *)shared;
  const float *lp = logprobs + block * depth * k;
  if (staged) {
    float *to = (float *)(shared + (heaps ? 0 : room * sizeof(Prefix)));
#pragma unroll 8
    for (int i = lane; i < depth * k; i += 32)
      to[i] = lp[i];
    lp = to;
  }
  int2 *nodes = all_nodes + block * (budget + 1);
  if (sums)
    sums += block * (budget + 1);
  int *walk = walks + block * (depth + 1);
  const int *truth = truths + block * depth;
  for (int i = lane; i <= depth; i += 32)
    walk[i] = 0;
  if (lane == 0)
    nodes[0] = {-1, 0};
  __syncwarp();

  int made = 0, n = 1;
  int last = 0, met = 0, child = 0, next = truth[0];
  if (lane == 0)
    heap[0] = {key_of(lp[0]), 0, placed(0, 1)};
  __syncwarp();
  while (made < budget && n > 0 && (sums || next != ABSENT)) {
    const Prefix p = heap[0];
    const int node = ++made, rank = rank_of(p.place), d = depth_of(p.place);
    const double sum = sum_of(p.key);
    if (lane == 0) {
      nodes[node] = {p.parent, p.place};
      if (sums)
        sums[node] = sum;
    }
    if (p.parent == last) {
      if (next == UNKNOWN) {
        if (child == 0)
          child = node;
        if (!sums)
          break;
      } else if (rank == next) {
        if (lane == 0)
          walk[met] = node;
        met++;
        last = node;
        next = met < depth ? truth[met] : ABSENT;
      }
    }
    __syncwarp();
    const float *at = lp + (d - 1) * k + rank;
    if (rank + 1 < k) {
      replace(heap, n, {key_of(sum - (double)at[0] + (double)at[1]), p.parent, placed(rank + 1, d)}, nodes);
    } else if (--n > 0) {
      const Prefix end = heap[n];
      replace(heap, n, end, nodes);
    }
    if (d < depth)
      push(heap, n++, {key_of(sum + (double)lp[d * k]), node, placed(0, d + 1)}, nodes);
  }
  if (lane == 0) {
    walk[depth] = child;
    counts[block] = made;
  }
  if (!sums)
    return;
  // The host reads all of it, also where there are fewer prefixes.
  if (lane == 0)
    sums[0] = 0;
  for (int i = made + 1 + lane; i <= budget; i += 32) {
    nodes[i] = {-1, 0};
    sums[i] = 0;
  }
}
