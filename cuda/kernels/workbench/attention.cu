// Block attention with the anchor rule: reference, naive, fast.
//
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -o attention attention.cu -ldl
//   ./attention small     checks only, at sizes that compute-sanitizer can bear
//   ./attention           checks, then times at the drafter's shapes
//
// reference: a warp a row and head, in double precision, from the same bf16 inputs.
// naive: the same in float32, timed.
// fast: ../fast_attention.cu.
#include "bench.cuh"
#include "../fast_attention.cu"

constexpr int kQ = 32, kKV = 8, kDim = 128;

template <typename T>
__global__ void plain_attention(const bf16* q, const bf16* ck, const bf16* cv, const bf16* bk, const bf16* bv, const int4* spans, T* out,
                                double scale) {
  const int row = blockIdx.x, head = blockIdx.y, lane = threadIdx.x, kv = head / (kQ / kKV);
  const int4 s = spans[row];
  const int n = max(s.y - s.x, 0), m = max(s.w - s.z, 0);
  T o[4] = {0, 0, 0, 0}, top = -INFINITY, total = 0;
  for (int i = 0; i < n + m; i++) {
    const size_t at = (size_t)(i < n ? s.x + i : s.z + i - n) * kKV * kDim + kv * kDim;
    const bf16 *k = (i < n ? ck : bk) + at, *v = (i < n ? cv : bv) + at;
    T dot = 0;
    for (int d = lane; d < kDim; d += 32) dot += (T)__bfloat162float(q[(size_t)row * kQ * kDim + head * kDim + d]) * (T)__bfloat162float(k[d]);
    for (int x = 16; x; x /= 2) dot += __shfl_xor_sync(~0u, dot, x);
    dot *= (T)scale;
    T high = dot > top ? dot : top, keep = exp(top - high), w = exp(dot - high);
    total = total * keep + w;
    for (int d = 0; d < 4; d++) o[d] = o[d] * keep + w * (T)__bfloat162float(v[lane + 32 * d]);
    top = high;
  }
  for (int d = 0; d < 4; d++) out[(size_t)row * kQ * kDim + head * kDim + lane + 32 * d] = total == 0 ? 0 : o[d] / total;
}

// cut is the tiles of 16 rows, the last one what is left.
static std::vector<int2> cut(long rows) {
  std::vector<int2> t;
  for (long r = 0; r < rows; r += 16) t.push_back(make_int2((int)r, (int)std::min(16l, rows - r)));
  return t;
}

struct Problem {
  long rows, ctx, blk;
  Device<bf16> q, ck, cv, bk, bv, out;
  Device<int4> spans;
  Device<int2> tiles;
  TensorMap qm, ckm, cvm, bkm, bvm;
  Problem(long rows, long ctx, long blk, const std::vector<int4>& s)
      : rows(rows), ctx(ctx), blk(blk), q(rows * kQ * kDim), ck(ctx * kKV * kDim), cv(ctx * kKV * kDim), bk(blk * kKV * kDim),
        bv(blk * kKV * kDim), out(rows * kQ * kDim), spans(s), tiles(cut(rows)), qm(q, rows, kQ * kDim, kQ * kDim, 16), ckm(ck, ctx, kKV * kDim, kKV * kDim),
        cvm(cv, ctx, kKV * kDim, kKV * kDim), bkm(bk, std::max(blk, 1l), kKV * kDim, kKV * kDim), bvm(bv, std::max(blk, 1l), kKV * kDim, kKV * kDim) {
    normal(q, q.n, 1.5f, 1), normal(ck, ck.n, 1, 2), normal(cv, cv.n, 1, 3), normal(bk, bk.n, 1, 4), normal(bv, bv.n, 1, 5);
    CHECK(cudaFuncSetAttribute(fast_attention_128, cudaFuncAttributeMaxDynamicSharedMemorySize, kAttentionShared128));
  }
  void fast() {
    fast_attention_128<<<dim3(tiles.n, kKV), 160, kAttentionShared128>>>(qm, ckm, cvm, bkm, bvm, spans, tiles, out, kQ * kDim, kQ / kKV, 16,
                                                                       1 / std::sqrt((double)kDim));
  }
};

static uint64_t seed = 77;
static uint32_t draw() {
  seed = seed * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(seed >> 33);
}

// block_spans are those of the drafter: strictly before the anchor, own block.
static std::vector<int4> block_spans(long ctx, long blocks, int window, bool causal) {
  std::vector<int4> s;
  for (long b = 0; b < blocks; b++) {
    int anchor = (int)(ctx / 8 + b * (ctx - 18 - ctx / 8) / std::max(blocks - 1, 1l));
    for (int j = 0; j < 16; j++)
      s.push_back(make_int4(window ? std::max(0, anchor + j - (window - 1)) : 0, anchor, (int)b * 16, causal ? (int)b * 16 + j + 1 : (int)b * 16 + 16));
  }
  return s;
}

static std::vector<int4> random_spans(long rows, long ctx, long blk) {
  std::vector<int4> s;
  for (long i = 0; i < rows; i++) {
    int a = draw() % (ctx + 1), b = draw() % (ctx + 1), c = draw() % (blk + 1), d = draw() % (blk + 1);
    if (draw() % 4) s.push_back(make_int4(std::min(a, b), std::max(a, b), std::min(c, d), std::max(c, d)));
    else s.push_back(make_int4(a, a, d, draw() % 2 ? d : std::min((int)blk, d + 1)));
  }
  return s;
}

static void check(const char* name, long rows, long ctx, long blk, const std::vector<int4>& spans) {
  Problem p(rows, ctx, blk, spans);
  Device<double> want(rows * kQ * kDim);
  plain_attention<double><<<dim3(rows, kQ), 32>>>(p.q, p.ck, p.cv, p.bk, p.bv, p.spans, want, 1 / std::sqrt((double)kDim));
  p.fast();
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  auto w = want.get();
  auto g = p.out.get();
  double err = 0, norm = 0, worst = 0;
  bool zeros = true;
  for (long i = 0; i < (long)w.size(); i++) {
    double d = (double)__bfloat162float(g[i]) - w[i];
    err += d * d, norm += w[i] * w[i], worst = std::fmax(worst, std::fabs(d)), zeros = zeros && d == d;
    const int4 s = spans[i / (kQ * kDim)];
    if (s.x >= s.y && s.z >= s.w) zeros = zeros && __bfloat162float(g[i]) == 0;
  }
  double rel = std::sqrt(err / norm);
  printf("%-40s rows %4ld ctx %4ld: relative error %.1e, worst %.1e\n", name, rows, ctx, rel, worst);
  expect(rel < 5e-3 && worst < 3e-2 && zeros, name);  // bf16 weights and results: 2^-8 each
  p.out.poison();
  p.fast();
  auto again = p.out.get();
  expect(!std::memcmp(again.data(), g.data(), g.size() * 2), std::string(name) + ": not the same twice");
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  print_card();
  bool small = argc > 1 && !strcmp(argv[1], "small");
  check("full", 32, 100, 32, block_spans(100, 2, 0, false));
  check("any spans", 37, 150, 70, random_spans(37, 150, 70));
  if (!small) {
    check("full", 16 * 24, 2048, 16 * 24, block_spans(2048, 24, 0, false));
    check("window, causal", 16 * 24, 2048, 16 * 24, block_spans(2048, 24, 500, true));
    check("any spans", 333, 700, 90, random_spans(333, 700, 90));
    for (auto [ctx, blocks] : {std::pair<long, long>{2048, 32}, {2048, 128}, {4096, 128}})
      for (int window : {0, 2048}) {
        auto spans = block_spans(ctx, blocks, window, window != 0);
        Problem p(blocks * 16, ctx, blocks * 16, spans);
        double keys = 0;
        for (auto s : spans) keys += s.y - s.x + s.w - s.z;
        Device<float> out(p.out.n);
        float slow = median_ms([&] { plain_attention<float><<<dim3(p.rows, kQ), 32>>>(p.q, p.ck, p.cv, p.bk, p.bv, p.spans, out, 0.0883883); }, 1, 0);
        float ms = median_ms([&] { p.fast(); });
        double flop = 4.0 * kQ * kDim * keys;
        printf("ctx %ld anchors %ld window %d: naive %.2f ms, fast %.4f ms, %.0f TFLOP/s\n", ctx, blocks, window, slow, ms, flop / ms / 1e9);
      }
  }
  if (!small)
    for (auto [batch, prompt] : {std::pair<long, long>{32, 512}, {8, 4096}, {1, 32768}, {32, 1}}) {
      // Causal: prompt new rows of each sequence, and before them, where a row is
      // decoded, 512 others.
      const long past = prompt == 1 ? 512 : 0, each = (past + prompt + 63) / 64 * 64;
      std::vector<int4> spans;
      double keys = 0;
      for (long b = 0; b < batch; b++)
        for (long i = 0; i < prompt; i++) spans.push_back(make_int4(b * each, b * each + past + i + 1, 0, 0)), keys += past + i + 1;
      Problem p(batch * prompt, batch * each, 0, spans);
      std::vector<int2> tiles = cut(p.rows);
      if (prompt == 1) {
        tiles.clear();
        for (long b = 0; b < batch; b++) tiles.push_back(make_int2(b, 1));
      }
      Device<int2> own(tiles);
      float ms = median_ms([&] {
        fast_attention_128<<<dim3(own.n, kKV), 160, kAttentionShared128>>>(p.qm, p.ckm, p.cvm, p.bkm, p.bvm, p.spans, own, p.out, kQ * kDim,
                                                                          kQ / kKV, 16, 0.0883883);
      });
      printf("causal %ld x %ld, %ld before: %.4f ms, %.0f TFLOP/s, %.2f TB/s of keys and values\n", batch, prompt, past, ms,
             4.0 * kQ * kDim * keys / ms / 1e9, batch * each * kKV * kDim * 4.0 / ms / 1e9);
    }
  printf(failures ? "%d FAILED\n" : "all checks hold\n", failures);
  return failures != 0;
}
