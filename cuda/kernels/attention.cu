// dst = softmax(q k^T scale) v under spans, a block for each pair of a tile of a
// few query rows and one key/value head: see gpu/attention.go.
//
// A first pass over the keys finds each query's largest score, a second sums
// exponentials and weighted values in the order of the span, context first,
// one key after the other. So no tile border and no neighbour enters a sum.
// Keys outside a query's own span are never multiplied: they may be NaN.
#include "element.cuh"

struct Span {
  int ctx_lo, ctx_hi, blk_lo, blk_hi; // as cuda.Span
};

constexpr int KEYS = 32; // of a tile

template <typename T> struct Attention {
  Matrix<T> dst;
  Matrix<const T> q, ctx_k, ctx_v, blk_k, blk_v;
  const Span *spans;
  const int2 *tiles; // first row, and how many
  int group, dim, per; // group queries share a key head; a tile has at most per rows
  float scale;
};

// The part of a span that lies in the context, or in the block.
__device__ inline int2 part(Span s, bool block) {
  int2 p = block ? make_int2(s.blk_lo, s.blk_hi) : make_int2(s.ctx_lo, s.ctx_hi);
  return p.x < p.y ? p : make_int2(0, 0);
}

template <typename T> __device__ void attention(Attention<T> a) {
  extern __shared__ float memory[];
  const int head = blockIdx.y, row0 = a.tiles[blockIdx.x].x, rows = a.tiles[blockIdx.x].y;
  const int queries = rows * a.group, dim = a.dim, wide = dim + 1;
  float *q = memory;                      // [queries][dim], scaled
  float *out = q + a.per * a.group * dim; // [queries][dim]
  float *keys = out + a.per * a.group * dim; // [KEYS][dim + 1]
  float *scores = keys + KEYS * wide;     // [queries][KEYS]
  float *top = scores + a.per * a.group * KEYS; // [queries]
  double *sum = (double *)(top + (a.per * a.group + 1) / 2 * 2); // [queries]

  for (int i = threadIdx.x; i < queries * dim; i += blockDim.x) {
    const int r = i / dim / a.group, g = i / dim % a.group;
    q[i] = load(a.q.row(row0 + r) + (long long)(head * a.group + g) * dim + i % dim) * a.scale;
    out[i] = 0;
  }
  for (int i = threadIdx.x; i < queries; i += blockDim.x) {
    top[i] = -INFINITY;
    sum[i] = 0;
  }

  // One pass over the union of the rows' spans; weigh says which of the two.
  auto pass = [&](bool block, bool weigh) {
    int lo = 0, hi = 0;
    for (int r = 0; r < rows; r++) {
      const int2 p = part(a.spans[row0 + r], block);
      if (p.x == p.y)
        continue;
      lo = hi == 0 ? p.x : min(lo, p.x);
      hi = max(hi, p.y);
    }
    const Matrix<const T> k = block ? a.blk_k : a.ctx_k, v = block ? a.blk_v : a.ctx_v;
    for (int at = lo; at < hi; at += KEYS) {
      const int n = min(KEYS, hi - at);
      __syncthreads();
      for (int i = threadIdx.x; i < n * dim; i += blockDim.x)
        keys[i / dim * wide + i % dim] = load(k.row(at + i / dim) + (long long)head * dim + i % dim);
      __syncthreads();
      for (int i = threadIdx.x; i < queries * KEYS; i += blockDim.x) {
        const int j = i % KEYS;
        const int2 p = part(a.spans[row0 + i / KEYS / a.group], block);
        if (at + j < p.x || at + j >= p.y)
          continue; // such a score is never read
        const float *x = q + i / KEYS * dim, *y = keys + j * wide;
        float dot = 0;
        for (int c = 0; c < dim; c++)
          dot = fmaf(x[c], y[c], dot);
        scores[i] = weigh ? expf(dot - top[i / KEYS]) : dot;
      }
      __syncthreads();
      if (!weigh) {
        for (int i = threadIdx.x; i < queries; i += blockDim.x) {
          const int2 p = part(a.spans[row0 + i / a.group], block);
          for (int j = max(p.x - at, 0); j < min(p.y - at, n); j++)
            top[i] = fmaxf(top[i], scores[i * KEYS + j]); // passes over NaN
        }
        continue;
      }
      for (int i = threadIdx.x; i < queries * dim; i += blockDim.x) {
        const int2 p = part(a.spans[row0 + i / dim / a.group], block);
        const float *weight = scores + i / dim * KEYS;
        float o = out[i];
        for (int j = max(p.x - at, 0); j < min(p.y - at, n); j++) {
          o = fmaf(weight[j], load(v.row(at + j) + (long long)head * dim + i % dim), o);
          if (i % dim == 0)
            sum[i / dim] += weight[j];
        }
        out[i] = o;
      }
    }
  };
  pass(false, false);
  pass(true, false);
  pass(false, true);
  pass(true, true);
  __syncthreads();
  for (int i = threadIdx.x; i < queries * dim; i += blockDim.x) {
    const int r = i / dim / a.group, g = i / dim % a.group;
    const Span s = a.spans[row0 + r];
    const bool sees = s.ctx_lo < s.ctx_hi || s.blk_lo < s.blk_hi;
    store(a.dst.row(row0 + r) + (long long)(head * a.group + g) * dim + i % dim,
          sees ? out[i] * (float)(1 / sum[i / dim]) : 0);
  }
}

#define ATTENTION(name, T)                                                                                            \
  extern "C" __global__ void __launch_bounds__(128) name(                                                             \
      T *dst, long long dst_stride, const T *q, long long q_stride, const T *ctx_k, long long ctx_k_stride,           \
      const T *ctx_v, long long ctx_v_stride, const T *blk_k, long long blk_k_stride, const T *blk_v,                 \
      long long blk_v_stride, const Span *spans, const int2 *tiles, int group, int dim, int per, float scale) {       \
    attention<T>({{dst, dst_stride},     {q, q_stride},         {ctx_k, ctx_k_stride}, {ctx_v, ctx_v_stride},         \
                  {blk_k, blk_k_stride}, {blk_v, blk_v_stride}, spans, tiles, group, dim, per, scale});               \
  }

ATTENTION(attention_f32, float)
ATTENTION(attention_bf16, bf16)
