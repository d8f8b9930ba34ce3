// The head without logits: reference, naive, fast.
//
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -o head head.cu -ldl
//   ./head small          checks only, at sizes that compute-sanitizer can bear
//   ./head                checks, then times at M = 480 and 1920 (a card of 8 GB up)
//
// reference: logits in double precision, reduced on the host.
// naive: cuBLASLt's logits in memory, bf16, and a block a row that reduces them.
// fast: ../fast_head.cu; no logits in memory.
#include "bench.cuh"
#include "../fast_head.cu"

// --- reference ---

__global__ void reference_logits(double* out, const bf16* x, const bf16* w, const int* rows, long vocab, long depth) {
  long id = blockIdx.x * (long)(blockDim.x / 32) + threadIdx.x / 32;
  if (id >= vocab) return;
  const bf16* a = x + (long)rows[blockIdx.y] * depth;
  double s = 0;
  for (long i = threadIdx.x % 32; i < depth; i += 32) s += (double)__bfloat162float(a[i]) * (double)__bfloat162float(w[id * depth + i]);
  for (int m = 16; m; m /= 2) s += __shfl_xor_sync(~0u, s, m);
  if (threadIdx.x % 32 == 0) out[blockIdx.y * vocab + id] = s;
}

struct Row {
  double lse, kl, rkl, jsd, tv;
  std::vector<int> ids;
  int rank = -1;
};

// better is the order of results: by value, NaN like -Inf, then lowest id.
static bool better(double a, int i, double b, int j) {
  if (a != a) a = -INFINITY;
  if (b != b) b = -INFINITY;
  return a > b || (a == b && i < j);
}

static double log_sum(const double* l, long n) {
  double top = -INFINITY, s = 0;
  for (long i = 0; i < n; i++) top = std::fmax(top, l[i]);
  for (long i = 0; i < n; i++) s += std::exp(l[i] - top);
  return top + std::log(s);
}

static Row reduce(const double* d, const double* t, long n, int k, int label) {
  Row r;
  r.lse = log_sum(d, n);
  std::vector<int> order(n);
  for (long i = 0; i < n; i++) order[i] = (int)i;
  std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int i, int j) { return better(d[i], i, d[j], j); });
  r.ids.assign(order.begin(), order.begin() + k);
  if (label >= 0) {
    r.rank = 0;
    for (long i = 0; i < n; i++) r.rank += i != label && better(d[i], (int)i, d[label], label);
  }
  r.kl = r.rkl = r.jsd = r.tv = NAN;
  if (!t) return r;
  double z = log_sum(t, n);
  r.kl = r.rkl = r.jsd = r.tv = 0;
  for (long i = 0; i < n; i++) {
    double lp = t[i] - z, lq = d[i] - r.lse, p = std::exp(lp), q = std::exp(lq), m = (p + q) / 2;
    r.kl += p * (lp - lq), r.rkl += q * (lq - lp), r.tv += std::fabs(p - q) / 2;
    if (p > 0) r.jsd += 0.5 * p * (lp - std::log(m));
    if (q > 0) r.jsd += 0.5 * q * (lq - std::log(m));
  }
  return r;
}

// --- naive ---

__global__ void naive_reduce(const bf16* logits, long vocab, int k, const int* labels, float* lse, u64* best, int* rank) {
  __shared__ float shared[32];
  const bf16* l = logits + blockIdx.x * vocab;
  const int t = threadIdx.x, n = blockDim.x, label = labels[blockIdx.x];
  auto all = [&](float v, bool add) {
    for (int m = 16; m; m /= 2) {
      float o = __shfl_xor_sync(~0u, v, m);
      v = add ? v + o : fmaxf(v, o);
    }
    if (t % 32 == 0) shared[t / 32] = v;
    __syncthreads();
    v = shared[0];
    for (int i = 1; i < n / 32; i++) v = add ? v + shared[i] : fmaxf(v, shared[i]);
    __syncthreads();
    return v;
  };
  u64* own = best + blockIdx.x * k;
  for (int i = t; i < k; i += n) own[i] = 0;
  float top = -INFINITY;
  for (long i = t; i < vocab; i += n) top = fmaxf(top, __bfloat162float(l[i]));
  top = all(top, false);
  float sum = 0, before = 0, mark = __bfloat162float(l[label]);
  for (long i = t; i < vocab; i += n) {
    float v = __bfloat162float(l[i]);
    sum += exp2f((v - top) * kLog2e);
    before += v > mark || (v == mark && i < label);
    if (v >= value_of(load_now(own + k - 1))) insert(own, k, word_of(v, (int)i));
  }
  sum = all(sum, true);
  before = all(before, true);
  if (t == 0) lse[blockIdx.x] = top + logf(sum), rank[blockIdx.x] = (int)before;
}

// --- fast ---

struct Results {
  std::vector<float> lse, label_logit, target_lse, kl, rkl, jsd, tv, logits;
  std::vector<int> ids, rank;
  std::vector<unsigned> counted;
};

// Head owns the memory of one call's shape and launches it.
struct Head {
  long m, v, h, k;
  bool both;
  TensorMap xmap, wmap;
  const bf16 *x, *w;
  TensorMap* tmap = nullptr;
  const int *labels, *target_rows;
  Device<float2> draft, mixture;
  Device<float4> target;
  Device<u64> best;
  Device<unsigned> ranks;
  Device<float> label_logit, lse, target_lse, kl, rkl, jsd, tv, logits;
  Device<int> ids, rank;

  Head(const bf16* x, const bf16* w, const bf16* t, const int* labels, const int* target_rows, long m, long v, long h, long k)
      : m(m), v(v), h(h), k(k), both(t != nullptr), xmap(x, m, h, h), wmap(w, v, h, h), x(x), w(w), labels(labels),
        target_rows(target_rows), draft((both ? (v + 127) / 128 : (v + 255) / 256) * m), mixture(both ? (v + 127) / 128 * m : 0),
        target(both ? (v + 127) / 128 * m : 0), best(m * k), ranks(m), label_logit(m), lse(m), target_lse(m), kl(m), rkl(m), jsd(m),
        tv(m), logits(m * k), ids(m * k), rank(m) {
    if (t) tmap = new TensorMap(t, m, h, h);
    for (auto f : {(const void*)fast_head, (const void*)fast_head_both, (const void*)fast_head_mixture})
      CHECK(cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, kHeadShared));
    CHECK(cudaFuncSetAttribute(fast_head_begin, cudaFuncAttributeMaxDynamicSharedMemorySize, kBeginShared));
  }
  ~Head() { delete tmap; }
  size_t bytes() const {
    return 8 * (draft.n + mixture.n + best.n) + 16 * target.n + 4 * (ranks.n + 7 * m + logits.n + ids.n + rank.n);
  }
  int grid() const { return multiprocessors() / 2 * 2; }
  void begin(cudaStream_t s = 0) {
    fast_head_begin<<<(m + kBeginRows - 1) / kBeginRows, 128, kBeginShared, s>>>(x, w, labels, label_logit, best, ranks, m, h, k);
  }
  void product(cudaStream_t s = 0) {
    if (both)
      fast_head_both<<<grid(), 384, kHeadShared, s>>>(xmap, *tmap, wmap, draft, target, best, ranks, labels, label_logit, m, v, h, k);
    else
      fast_head<<<grid(), 384, kHeadShared, s>>>(xmap, wmap, draft, best, ranks, labels, label_logit, m, v, h, k);
  }
  void merge(cudaStream_t s = 0) {
    fast_head_merge<<<(m + 15) / 16, dim3(16, 32), 0, s>>>(draft, both ? target.p : nullptr, best, ranks, labels, target_rows, lse, ids,
                                                          logits, rank, target_lse, kl, rkl, m, both ? (v + 127) / 128 : (v + 255) / 256, k);
  }
  void second(cudaStream_t s = 0) {
    fast_head_mixture<<<grid(), 384, kHeadShared, s>>>(xmap, *tmap, wmap, mixture, lse, target_lse, m, v, h);
    fast_head_mixture_merge<<<(m + 15) / 16, dim3(16, 32), 0, s>>>(mixture, target_rows, jsd, tv, m, (v + 127) / 128);
  }
  void run(cudaStream_t s = 0) { begin(s), product(s), merge(s); }
  Results results() {
    for (auto* d : {&label_logit, &lse, &target_lse, &kl, &rkl, &jsd, &tv, &logits}) d->poison();
    draft.poison(), mixture.poison(), target.poison(), best.poison(), ranks.poison(), ids.poison(), rank.poison();
    run();
    if (both) second();
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    return {lse.get(), label_logit.get(), target_lse.get(), kl.get(), rkl.get(), jsd.get(), tv.get(), logits.get(), ids.get(), rank.get(), ranks.get()};
  }
};

// --- checks ---

static double gap(double a, double b) { return a != a && b != b ? 0 : a == b ? 0 : std::fabs(a - b); }

struct Worst {
  double logit = 0, lse = 0, kl = 0, rkl = 0, jsd = 0, tv = 0;
  void take(double& w, double g) { w = g != g || w != w ? NAN : std::max(w, g); }
};

// compare checks row i of got against want, made of logits d. near is how far
// apart two logits may lie for their order to be left open: 0 for none.
static void compare(const Results& got, long i, const Row& want, const double* d, long vocab, int k, int label, double near, Worst& worst, const std::string& name) {
  char at[200];
  snprintf(at, sizeof at, "%s row %ld", name.c_str(), i);
  worst.take(worst.lse, gap(got.lse[i], want.lse) / (1 + std::fabs(std::isfinite(want.lse) ? want.lse : 0)));
  for (int n = 0; n < k; n++) {
    int id = got.ids[i * k + n];
    if (!expect(id >= 0 && id < vocab, std::string(at) + ": id out of range")) return;
    bool ok = id == want.ids[n] || std::fabs(d[id] - d[want.ids[n]]) <= near;
    for (int o = 0; o < n; o++) ok = ok && got.ids[i * k + o] != id;
    if (!ok) printf("  place %d: got %d (%g), want %d (%g)\n", n, id, d[id], want.ids[n], d[want.ids[n]]);
    expect(ok, std::string(at) + ": best ids");
    worst.take(worst.logit, gap(got.logits[i * k + n], d[id]));
  }
  if (label < 0) {
    expect(got.rank[i] == -1, std::string(at) + ": rank without label");
    expect(std::isnan(got.label_logit[i]), std::string(at) + ": logit without label");
    return;
  }
  worst.take(worst.logit, gap(got.label_logit[i], d[label]));
  int lo = want.rank, hi = want.rank;
  if (near > 0) {
    lo = hi = 0;
    for (long j = 0; j < vocab; j++)
      if (j != label) lo += d[j] > d[label] + near, hi += d[j] > d[label] - near;
  }
  bool ok = got.rank[i] >= lo && got.rank[i] <= hi && got.counted[i] == (unsigned)got.rank[i];
  if (!ok) printf("  got %d (counted %u), want %d..%d\n", got.rank[i], got.counted[i], lo, hi);
  expect(ok, std::string(at) + ": rank");
}

static void compare_losses(const Results& got, long i, const Row& want, bool lacks, Worst& worst) {
  if (lacks) {
    expect(std::isnan(got.kl[i]) && std::isnan(got.rkl[i]) && std::isnan(got.jsd[i]) && std::isnan(got.tv[i]), "losses without target");
    return;
  }
  worst.take(worst.kl, gap(got.kl[i], want.kl) / (1 + std::fabs(want.kl)));
  worst.take(worst.rkl, gap(got.rkl[i], want.rkl) / (1 + std::fabs(want.rkl)));
  worst.take(worst.jsd, gap(got.jsd[i], want.jsd));
  worst.take(worst.tv, gap(got.tv[i], want.tv));
}

static void report(const std::string& name, const Worst& w, double logit, double rest) {
  printf("%-44s logit %.1e lse %.1e kl %.1e rkl %.1e jsd %.1e tv %.1e\n", name.c_str(), w.logit, w.lse, w.kl, w.rkl, w.jsd, w.tv);
  expect(w.logit <= logit, name + ": logits");
  expect(w.lse <= 2e-6 && w.kl <= rest && w.rkl <= rest && w.jsd <= rest && w.tv <= rest, name + ": sums");
}

static uint32_t draw(uint64_t& s) {
  s = s * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(s >> 33);
}

static void bits_equal(const Results& a, const Results& b, long shift, long rows, int k, bool both, const std::string& what) {
  bool ok = true;
  auto same = [&](const auto& u, const auto& v, long width) {
    ok = ok && std::memcmp(&u[shift * width], &v[0], rows * width * sizeof u[0]) == 0;
  };
  same(a.lse, b.lse, 1), same(a.ids, b.ids, k), same(a.logits, b.logits, k), same(a.label_logit, b.label_logit, 1), same(a.rank, b.rank, 1);
  if (both) same(a.kl, b.kl, 1), same(a.rkl, b.rkl, 1), same(a.jsd, b.jsd, 1), same(a.tv, b.tv, 1);
  expect(ok, what);
}

// check_exact uses small whole numbers: every sum is exact and many logits
// tie, so ids and ranks must be right to the last.
static void check_exact(long m, long v, long h, int k, bool both, bool bad, uint64_t seed) {
  char name[100];
  snprintf(name, sizeof name, "exact M %ld V %ld H %ld K %d%s%s", m, v, h, k, both ? " losses" : "", bad ? " NaN, Inf" : "");
  std::vector<bf16> x(m * h), w(v * h), t(m * h);
  std::vector<int> labels(m), rows(m);
  for (auto& e : x) e = __float2bfloat16((int)(draw(seed) % 3) - 1);
  for (auto& e : w) e = __float2bfloat16(((int)(draw(seed) % 3) - 1) / 4.0f);
  for (auto& e : t) e = __float2bfloat16((int)(draw(seed) % 3) - 1);
  for (long i = 0; i < m; i++) labels[i] = i % 5 == 4 ? -1 : draw(seed) % v, rows[i] = i % 7 == 3 ? -1 : (int)i;
  if (bad) {
    if (m > 1) x[1 * h + 3] = __float2bfloat16(NAN);
    if (m > 2) x[2 * h + 5] = __float2bfloat16(INFINITY);
    if (m > 5) x[5 * h + 1] = __float2bfloat16(-INFINITY);
    w[(v / 2) * h + 2] = __float2bfloat16(NAN);
    w[(v - 1) * h + 7] = __float2bfloat16(INFINITY);
  }
  std::vector<double> d(m * v), p(m * v);
  std::vector<float> xf(m * h), wf(v * h), tf(m * h);
  for (size_t i = 0; i < x.size(); i++) xf[i] = __bfloat162float(x[i]), tf[i] = __bfloat162float(t[i]);
  for (size_t i = 0; i < w.size(); i++) wf[i] = __bfloat162float(w[i]);
  for (long i = 0; i < m; i++)
    for (long j = 0; j < v; j++) {
      float a = 0, b = 0;
      for (long c = 0; c < h; c++) a += xf[i * h + c] * wf[j * h + c], b += both ? tf[i * h + c] * wf[j * h + c] : 0;
      d[i * v + j] = a, p[i * v + j] = b;
    }
  Device<bf16> dx(x), dw(w), dt(t);
  Device<int> dl(labels), dr(rows);
  Head head(dx, dw, both ? dt.p : nullptr, dl, dr, m, v, h, k);
  Results got = head.results();
  Worst worst;
  for (long i = 0; i < m; i++) {
    Row want = reduce(&d[i * v], both ? &p[i * v] : nullptr, v, k, labels[i]);
    compare(got, i, want, &d[i * v], v, k, labels[i], 0, worst, name);
    if (both && !bad) compare_losses(got, i, want, rows[i] < 0, worst);
  }
  report(name, worst, 0, 1e-5);
  bits_equal(got, head.results(), 0, m, k, both, std::string(name) + ": not the same twice");
  if (m > 70) {
    // Rows 37.. alone give the same bits.
    long lo = 37, n = m - 37 - 1;
    Device<int> some(std::vector<int>(labels.begin() + lo, labels.begin() + lo + n)), of(std::vector<int>(rows.begin() + lo, rows.begin() + lo + n));
    Head part(dx.p + lo * h, dw, both ? dt.p + lo * h : nullptr, some, of, n, v, h, k);
    bits_equal(got, part.results(), lo, n, k, both, std::string(name) + ": rows depend on others");
  }
}

struct Big {
  long v, h;
  Device<bf16> w;
  Big(long v, long h) : v(v), h(h), w(v * h) { normal(w, v * h, 0.02f, 1); }
};

// check_big compares some rows at the full shape with double precision.
static void check_big(Big& b, Lt& lt, long m, int k, bool both) {
  Device<bf16> x(m * b.h), t(m * b.h);
  normal(x, x.n, 1, 100 + m), normal(t, t.n, 1, 200 + m);
  uint64_t seed = 5 + m;
  std::vector<int> labels(m), rows(m), sample;
  for (long i = 0; i < m; i++) labels[i] = draw(seed) % b.v, rows[i] = (int)i;
  for (long i = 0; i < 6; i++) sample.push_back((int)(i * (m - 1) / 5));
  Device<int> dl(labels), dr(rows), ds(sample);
  Head head(x, b.w, both ? t.p : nullptr, dl, dr, m, b.v, b.h, k);
  Results got = head.results();
  // Labels that are the rows' own best ids: logit and rank must agree to the bit.
  for (long i = 0; i < m; i += 2) labels[i] = got.ids[i * k + i / 2 % k];
  dl.put(labels);
  got = head.results();
  for (long i = 0; i < m; i += 2) {
    bool ok = got.rank[i] == i / 2 % k && got.counted[i] == (unsigned)got.rank[i] &&
              std::memcmp(&got.label_logit[i], &got.logits[i * k + i / 2 % k], 4) == 0;
    if (!ok) printf("  row %ld: rank %d counted %u place %ld, logit %.9g against %.9g\n", i, got.rank[i], got.counted[i], i / 2 % k, got.label_logit[i], got.logits[i * k + i / 2 % k]);
    if (!expect(ok, "labels among the best")) break;
  }
  Device<double> d(sample.size() * b.v), p(sample.size() * b.v);
  dim3 grid((b.v + 7) / 8, sample.size());
  reference_logits<<<grid, 256>>>(d, x, b.w, ds, b.v, b.h);
  reference_logits<<<grid, 256>>>(p, t, b.w, ds, b.v, b.h);
  CHECK(cudaDeviceSynchronize());
  auto hd = d.get(), hp = p.get();
  Worst worst;
  char name[100];
  snprintf(name, sizeof name, "gaussian M %ld V %ld H %ld%s", m, b.v, b.h, both ? " losses" : "");
  for (size_t s = 0; s < sample.size(); s++) {
    long i = sample[s];
    Row want = reduce(&hd[s * b.v], both ? &hp[s * b.v] : nullptr, b.v, k, labels[i]);
    compare(got, i, want, &hd[s * b.v], b.v, k, labels[i], 1e-4, worst, name);
    if (both) compare_losses(got, i, want, false, worst);
  }
  // The bar for logits is what cuBLASLt's own float32 results miss by.
  Device<float> plain(m * b.v);
  auto plan = lt.plan(x, b.w, plain, m, b.v, b.h, false, 1, 0, CUDA_R_32F);
  lt.run(plan, x, b.w, plain);
  std::vector<float> row(b.v);
  double theirs = 0;
  for (size_t s = 0; s < sample.size(); s++) {
    CHECK(cudaMemcpy(row.data(), plain.p + (size_t)sample[s] * b.v, b.v * 4, cudaMemcpyDeviceToHost));
    for (long j = 0; j < b.v; j++) theirs = std::max(theirs, std::fabs(row[j] - hd[s * b.v + j]));
  }
  printf("cublasLt, float32 out, misses logits by up to %.1e\n", theirs);
  report(name, worst, theirs, 2e-5);
  bits_equal(got, head.results(), 0, m, k, both, std::string(name) + ": not the same twice");
}

static void time_big(Big& b, Lt& lt, long m, int k, bool naive) {
  Device<bf16> x(m * b.h), t(m * b.h);
  normal(x, x.n, 1, 300 + m), normal(t, t.n, 1, 400 + m);
  uint64_t seed = 9;
  std::vector<int> labels(m);
  for (auto& l : labels) l = draw(seed) % b.v;
  Device<int> dl(labels);
  double flop = 2.0 * m * b.v * b.h;
  float blas = 0, slow = 0;
  {
    Device<bf16> logits(m * b.v);
    auto plan = lt.plan(x, b.w, logits, m, b.v, b.h, false, 6);
    if (naive) {
      Device<float> lse(m);
      Device<u64> best(m * k);
      Device<int> rank(m);
      slow = median_ms([&] {
        lt.run(plan, x, b.w, logits);
        naive_reduce<<<m, 512>>>(logits, b.v, k, dl, lse, best, rank);
      }, 5, 1);
    }
  }
  // Product and head take turns, so that heat and power caps meet both alike.
  Head head(x, b.w, nullptr, dl, nullptr, m, b.v, b.h, k);
  float all = 0;
  {
    Device<bf16> logits(m * b.v);
    auto plan = lt.plan(x, b.w, logits, m, b.v, b.h, false, 6);
    std::vector<float> theirs, ours;
    for (int i = 0; i < 21; i++) {
      theirs.push_back(median_ms([&] { lt.run(plan, x, b.w, logits); }, 1, 1));
      ours.push_back(median_ms([&] { head.run(); }, 1, 1));
    }
    std::sort(theirs.begin(), theirs.end()), std::sort(ours.begin(), ours.end());
    blas = theirs[10], all = ours[10];
  }
  float begin = median_ms([&] { head.begin(); });
  head.run();
  float product = median_ms([&] { head.begin(), head.product(); }) - begin, merge = median_ms([&] { head.merge(); });
  Head with(x, b.w, t, dl, nullptr, m, b.v, b.h, k);
  float both = median_ms([&] { with.run(); }), second = median_ms([&] { with.second(); }), cut = 0;
  if (m > 1024) {
    // Both kinds of rows outgrow the L2 cache: 1024 at a time.
    Head one(x, b.w, t, dl, nullptr, 1024, b.v, b.h, k), two(x + 1024 * b.h, b.w, t + 1024 * b.h, dl + 1024, nullptr, m - 1024, b.v, b.h, k);
    cut = median_ms([&] { one.run(), two.run(); });
  }
  printf("M %4ld  cublasLt %.3f ms (%.0f TFLOP/s)  naive %.3f  fast %.3f (%.0f TFLOP/s, %.3fx): begin %.3f product %.3f merge %.3f, %.0f MB;  "
         "with KL, RKL %.3f (%.3fx; by 1024 rows %.3f), %.0f MB; JSD, TV %.3f more\n",
         m, blas, flop / blas / 1e9, slow, all, flop / all / 1e9, all / blas, begin, product, merge, head.bytes() / 1e6, both, both / all, cut,
         with.bytes() / 1e6, second);
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  print_card();
  bool small = argc > 1 && !strcmp(argv[1], "small");
  check_exact(1, 8, 64, 8, false, false, 1);
  check_exact(5, 250, 72, 1, true, false, 2);
  check_exact(65, 300, 128, 8, false, true, 3);
  check_exact(70, 1100, 64, 8, true, true, 4);
  check_exact(129, 600, 128, 8, true, false, 5);
  if (!small) {
    check_exact(128, 256, 64, 8, false, false, 6);
    check_exact(300, 2500, 320, 8, false, false, 7);
    check_exact(300, 2500, 320, 32, true, false, 8);
    check_exact(257, 1025, 128, 11, false, true, 9);
    Big big(248320, 5120);
    Lt lt;
    check_big(big, lt, 200, 8, true);
    check_big(big, lt, 480, 8, false);
    for (long m : {480, 1920}) time_big(big, lt, m, 8, m == 480);
  }
  printf(failures ? "%d FAILED\n" : "all checks hold\n", failures);
  return failures != 0;
}
