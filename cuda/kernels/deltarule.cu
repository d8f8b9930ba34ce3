// The gated delta rule, row after row: see gpu/deltarule.go.
//
// A column of a head's state never meets another column, so each is owned by
// LANES neighbouring threads that hold KEYS of its values each, in registers,
// for the whole call. The recurrence gives the same bits however the rows are
// cut; fast_delta.cu solves them in chunks. Where that left flags in redo, one for
// each head and slice of columns and one for all, only what is flagged is done.
#include "element.cuh"

constexpr int LANES = 8;

// beta = sigmoid(b), alpha = exp(-exp(A_log) softplus(a + dt_bias)); q and k of
// unit length, q times scale. A block a row; room for the outcome is given.
// redo is the flag for all, or null.
template <typename T>
__device__ void prepare(float *q_out, float *k_out, float *alpha, float *beta, Matrix<const T> q, Matrix<const T> k,
                        Matrix<const T> a, Matrix<const T> b, const T *a_log, const T *dt_bias, int key_heads,
                        int val_heads, int dim, const int *redo) {
  if (redo && !*redo)
    return;
  const long long t = blockIdx.x;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int i = threadIdx.x / 32; i < 2 * key_heads; i += warps) {
    const bool is_q = i < key_heads;
    const int h = is_q ? i : i - key_heads;
    const T *x = (is_q ? q : k).row(t) + (long long)h * dim;
    double squares = 0;
    for (int j = lane; j < dim; j += 32) {
      const double v = load(x + j);
      squares += v * v;
    }
    for (int d = 16; d > 0; d /= 2)
      squares += __shfl_xor_sync(~0u, squares, d);
    const float inv = (float)((is_q ? 1 / sqrt((double)dim) : 1) / sqrt(squares + 1e-6));
    float *to = (is_q ? q_out : k_out) + (t * key_heads + h) * dim;
    for (int j = lane; j < dim; j += 32)
      to[j] = load(x + j) * inv;
  }
  for (int h = threadIdx.x; h < val_heads; h += blockDim.x) {
    beta[t * val_heads + h] = (float)(1 / (1 + exp(-(double)load(b.row(t) + h))));
    const double x = (double)load(a.row(t) + h) + (double)load(dt_bias + h);
    const double softplus = x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
    alpha[t * val_heads + h] = (float)exp(-exp((double)load(a_log + h)) * softplus);
  }
}

// S *= alpha; u = beta (v - S^T k); S += k u^T; o = S^T q for rows 0..rows-1 of
// value head blockIdx.y. Thread x of a block has column x / LANES of the
// block's columns. KEYS * LANES is at least dim; the rest of the keys are 0. redo
// has slices flags a head, or is null.
template <typename T, int KEYS>
__device__ void deltarule(Matrix<T> dst, const float *q, const float *k, const float *alpha, const float *beta,
                          Matrix<const T> v, Matrix<float> state, int rows, int key_heads, int val_heads, int dim,
                          int val_dim, const int *redo, int slices) {
  if (redo && !redo[blockIdx.y * slices + blockIdx.x * (blockDim.x / LANES) / 64])
    return;
  const int h = blockIdx.y, kh = h / (val_heads / key_heads), lane = threadIdx.x % LANES;
  const int column = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
  const bool own = column < val_dim; // threads without a column go along, for the shuffles
  float s[KEYS];
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    const int key = lane + i * LANES;
    s[i] = own && key < dim ? state.row((long long)h * dim + key)[column] : 0;
  }
  for (int t = 0; t < rows; t++) {
    const float *qt = q + ((long long)t * key_heads + kh) * dim, *kt = k + ((long long)t * key_heads + kh) * dim;
    float key[KEYS], dot = 0;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      key[i] = lane + i * LANES < dim ? kt[lane + i * LANES] : 0;
      dot = fmaf(s[i], key[i], dot);
    }
#pragma unroll
    for (int d = LANES / 2; d > 0; d /= 2)
      dot += __shfl_xor_sync(~0u, dot, d);
    const float decay = alpha[(long long)t * val_heads + h];
    const float value = own ? load(v.row(t) + (long long)h * val_dim + column) : 0;
    const float u = beta[(long long)t * val_heads + h] * (value - decay * dot);
    float o = 0;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      s[i] = fmaf(key[i], u, s[i] * decay);
      o = fmaf(s[i], lane + i * LANES < dim ? qt[lane + i * LANES] : 0, o);
    }
#pragma unroll
    for (int d = LANES / 2; d > 0; d /= 2)
      o += __shfl_xor_sync(~0u, o, d);
    if (own && lane == 0)
      store(dst.row(t) + (long long)h * val_dim + column, o);
  }
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    const int key = lane + i * LANES;
    if (own && key < dim)
      state.row((long long)h * dim + key)[column] = s[i];
  }
}

#define PREPARE(name, T)                                                                                              \
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      name(float *q_out, float *k_out, float *alpha, float *beta, const T *q, long long q_stride, const T *k,         \
           long long k_stride, const T *a, long long a_stride, const T *b, long long b_stride, const T *a_log,        \
           const T *dt_bias, int key_heads, int val_heads, int dim, const int *redo) {                                \
    prepare<T>(q_out, k_out, alpha, beta, {q, q_stride}, {k, k_stride}, {a, a_stride}, {b, b_stride}, a_log, dt_bias, \
               key_heads, val_heads, dim, redo);                                                                      \
  }
#define DELTARULE(name, T, KEYS)                                                                                      \
  extern "C" __global__ void __launch_bounds__(128)                                                                   \
      name(T *dst, long long dst_stride, const float *q, const float *k, const float *alpha, const float *beta,       \
           const T *v, long long v_stride, float *state, long long state_stride, int rows, int key_heads,             \
           int val_heads, int dim, int val_dim, const int *redo, int slices) {                                        \
    deltarule<T, KEYS>({dst, dst_stride}, q, k, alpha, beta, {v, v_stride}, {state, state_stride}, rows, key_heads,   \
                       val_heads, dim, val_dim, redo, slices);                                                        \
  }

PREPARE(prepare_f32, float)
PREPARE(prepare_bf16, bf16)
DELTARULE(deltarule32_f32, float, 4)
DELTARULE(deltarule128_f32, float, 16)
DELTARULE(deltarule256_f32, float, 32)
DELTARULE(deltarule32_bf16, bf16, 4)
DELTARULE(deltarule128_bf16, bf16, 16)
DELTARULE(deltarule256_bf16, bf16, 32)
