// What a row of logits comes down to: see gpu/head.go. A block a row; logits
// are float whatever the element type, and lie in a workspace that holds a
// bounded number of rows.
#include "element.cuh"

constexpr int THREADS = 256;

// What logits are ranked by: NaN as -Inf, equal ones by lowest id.
__device__ inline float ordered(float v) { return v != v ? -INFINITY : v; }
__device__ inline bool before(float v, int id, float w, int other) { return v > w || (v == w && id < other); }

struct Place {
  float v;
  int id;
};

// The place that comes first among those that the block's threads offer, in
// every thread; which thread offered it in *owner.
__device__ inline Place first(Place mine, Place *room, int *owner) {
  Place p = mine;
  int who = threadIdx.x;
  for (int d = 16; d > 0; d /= 2) {
    Place q = {__shfl_xor_sync(~0u, p.v, d), __shfl_xor_sync(~0u, p.id, d)};
    const int other = __shfl_xor_sync(~0u, who, d);
    if (before(q.v, q.id, p.v, p.id)) {
      p = q;
      who = other;
    }
  }
  __shared__ int whose[THREADS / 32];
  if (threadIdx.x % 32 == 0) {
    room[threadIdx.x / 32] = p;
    whose[threadIdx.x / 32] = who;
  }
  __syncthreads();
  p = room[0];
  who = whose[0];
  for (int i = 1; i < THREADS / 32; i++) {
    if (before(room[i].v, room[i].id, p.v, p.id)) {
      p = room[i];
      who = whose[i];
    }
  }
  __syncthreads();
  *owner = who;
  return p;
}

// The thread's own first place after p in a row; id is vocab when none is left.
__device__ inline Place next(const float *logits, int vocab, Place p) {
  Place best = {-INFINITY, vocab};
  for (int j = threadIdx.x; j < vocab; j += THREADS) {
    const float v = ordered(logits[j]);
    if (before(p.v, p.id, v, j) && before(v, j, best.v, best.id))
      best = {v, j};
  }
  return best;
}

// The largest logit, the log of the sum of exponentials beside it, the k
// first places, and the label's logit and rank. labels, ids may be null.
extern "C" __global__ void __launch_bounds__(THREADS)
    head_reduce(const float *logits, long long stride, int vocab, int k, const int *labels, float *top, double *log_sum,
                int *ids, float *values, float *label_logit, int *label_rank) {
  __shared__ Place room[THREADS / 32];
  __shared__ double sums[32];
  const long long row = blockIdx.x;
  const float *x = logits + row * stride;
  const Place start = {INFINITY, -1};
  Place mine = next(x, vocab, start);
  int owner;
  Place best = first(mine, room, &owner);
  const float largest = best.v;
  for (int i = 0; i < k; i++) {
    if (threadIdx.x == 0) {
      ids[row * k + i] = best.id;
      values[row * k + i] = x[best.id]; // a NaN again, if it was one
    }
    if (i + 1 == k)
      break;
    if (threadIdx.x == owner)
      mine = next(x, vocab, best);
    best = first(mine, room, &owner);
  }
  double sum = 0;
  for (int j = threadIdx.x; j < vocab; j += THREADS)
    sum += expf(x[j] - largest);
  sum = block_sum(sum, sums);
  if (threadIdx.x == 0) {
    top[row] = largest;
    log_sum[row] = log(sum);
  }
  if (labels == nullptr)
    return;
  const int label = labels[row];
  if (label < 0) {
    if (threadIdx.x == 0) {
      label_logit[row] = NAN;
      label_rank[row] = -1;
    }
    return;
  }
  const float own = ordered(x[label]);
  double ahead = 0; // exact: far below 2^53
  for (int j = threadIdx.x; j < vocab; j += THREADS)
    ahead += before(ordered(x[j]), j, own, label);
  ahead = block_sum(ahead, sums);
  if (threadIdx.x == 0) {
    label_logit[row] = x[label];
    label_rank[row] = (int)ahead;
  }
}

// The divergences of draft row blockIdx.x, q, from target row which[row], p.
// Sums are of e^(logit-top), whose own sum divides them at the end, so that a
// draft equal to its target has none. which is -1 for no target.
extern "C" __global__ void __launch_bounds__(THREADS)
    head_losses(const float *draft, long long draft_stride, const float *draft_top, const double *draft_log_sum,
                const float *target, long long target_stride, const float *target_top, const double *target_log_sum,
                const int *which, int vocab, float *kl, float *rkl, float *jsd, float *tv) {
  __shared__ double sums[32];
  const long long row = blockIdx.x;
  const int t = which[row];
  if (t < 0) {
    if (threadIdx.x == 0)
      kl[row] = rkl[row] = jsd[row] = tv[row] = NAN;
    return;
  }
  const float *x = draft + row * draft_stride, *y = target + t * target_stride;
  const float q_top = draft_top[row], p_top = target_top[t];
  const double q_log = draft_log_sum[row], p_log = target_log_sum[t];
  const float q_inv = (float)exp(-q_log), p_inv = (float)exp(-p_log);
  double forward = 0, reverse = 0, mixed = 0, apart = 0;
  for (int j = threadIdx.x; j < vocab; j += THREADS) {
    const float eq = expf(x[j] - q_top), ep = expf(y[j] - p_top);
    const double more = (double)y[j] - x[j]; // log p - log q, but for a constant
    // A logit of -Inf has no probability, and nothing to add.
    if (ep > 0)
      forward += ep * more;
    if (eq > 0)
      reverse -= eq * more;
    const float q = eq * q_inv, p = ep * p_inv, m = (p + q) / 2;
    apart += fabsf(p - q);
    if (p > 0 && m > 0)
      mixed += p * logf(p / m);
    if (q > 0 && m > 0)
      mixed += q * logf(q / m);
  }
  forward = block_sum(forward, sums);
  reverse = block_sum(reverse, sums);
  mixed = block_sum(mixed, sums);
  apart = block_sum(apart, sums);
  if (threadIdx.x != 0)
    return;
  const double lse_q = q_top + q_log, lse_p = p_top + p_log;
  // Divergences are not below 0, whatever the rounding; NaN stays NaN.
  const auto floor0 = [](double v) { return v < 0 ? 0.f : (float)v; };
  kl[row] = floor0(forward * exp(-p_log) - lse_p + lse_q);
  rkl[row] = floor0(reverse * exp(-q_log) - lse_q + lse_p);
  jsd[row] = floor0(mixed / 2);
  tv[row] = (float)(apart / 2);
}
