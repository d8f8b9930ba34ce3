// The drafter stage as a whole: context + draft + head at the shapes of the
// Qwen3.6-27B drafter, from the fast kernels and cuBLASLt, in CUDA graphs. A
// library for stage.py, which gives it a PyTorch user's weights and inputs,
// compares the results and times both in one run.
//
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Xcompiler -fPIC -shared -o libstage.so stage.cu -ldl
#include "bench.cuh"
#include "../fast_attention.cu"
#include "../fast_head.cu"
#define bf16 bf16_of_ops
#include "passes.cuh"
#undef bf16

constexpr long H = 5120, L = 5, QH = 32, KVH = 8, HD = 128, FF = 17408, V = 248320, B = 16, TAPS = 5, K = 8;
constexpr long QKV = (QH + 2 * KVH) * HD, KV2 = 2 * KVH * HD;
constexpr double kEps = 1e-6, kTheta = 1e7;

// Given are the pointers of one case, in the order of stage.py.
struct Given {
  const bf16 *taps, *fc, *hidden_norm, *x, *norm, *head;
  const int *ctx_pos, *pos, *labels;
  const int4* spans;
  struct Layer {
    const bf16 *q, *k, *v, *o, *gate, *up, *down, *qn, *kn, *n1, *n2;
  } layers[L];
};

static void copy(bf16* to, const bf16* from, size_t n) { CHECK(cudaMemcpy(to, from, n * 2, cudaMemcpyDeviceToDevice)); }

struct Stage {
  long n, m, rows;  // context rows, block rows, head rows
  Given g;
  Lt lt;
  // Weights side by side, so that one product does for several.
  Device<bf16> ctx_kv_w, kns, qkv_w[L], gu_w[L];
  Device<bf16> fc_out, ctx, ctx_kv, x, u, qkv, att, gu, act, z;
  Device<float2> ctx_table, table, parts;
  Device<u64> best;
  Device<unsigned> ranks;
  Device<float> label_logit, lse, logits;
  Device<int> ids, rank;
  Device<int2> tiles;  // of attention's rows: the blocks
  std::vector<TensorMap*> maps;
  TensorMap *qm, *ckm[L], *cvm[L], *bkm, *bvm, *zm, *wm;
  Lt::Plan fc_plan, kv_plan, qkv_plan, o_plan, gu_plan, down_plan;
  cudaStream_t stream;
  cudaGraphExec_t graphs[4];

  Stage(long n, long anchors, const Given& given)
      : n(n), m(anchors * B), rows(anchors * (B - 1)), g(given), ctx_kv_w(L * KV2 * H), kns(L * HD),
        qkv_w{Device<bf16>(QKV * H), Device<bf16>(QKV * H), Device<bf16>(QKV * H), Device<bf16>(QKV * H), Device<bf16>(QKV * H)},
        gu_w{Device<bf16>(2 * FF * H), Device<bf16>(2 * FF * H), Device<bf16>(2 * FF * H), Device<bf16>(2 * FF * H), Device<bf16>(2 * FF * H)},
        fc_out(n * H), ctx(n * H), ctx_kv(n * L * KV2), x(m * H), u(m * H), qkv(m * QKV), att(m * QH * HD), gu(m * 2 * FF), act(m * FF),
        z(rows * H), ctx_table(n * 64), table(m * 64), parts((V + 255) / 256 * rows), best(rows * K), ranks(rows), label_logit(rows), lse(rows),
        logits(rows * K), ids(rows * K), rank(rows), tiles(m / B) {
    std::vector<int2> blocks;
    for (long b = 0; b < m / B; b++) blocks.push_back(make_int2((int)(b * B), (int)B));
    tiles.put(blocks);
    for (long l = 0; l < L; l++) {
      const auto& w = g.layers[l];
      copy(ctx_kv_w + l * KV2 * H, w.k, KV2 / 2 * H), copy(ctx_kv_w + l * KV2 * H + KV2 / 2 * H, w.v, KV2 / 2 * H);
      copy(qkv_w[l], w.q, QH * HD * H), copy(qkv_w[l] + QH * HD * H, w.k, KV2 / 2 * H), copy(qkv_w[l] + (QH + KVH) * HD * H, w.v, KV2 / 2 * H);
      copy(gu_w[l], w.gate, FF * H), copy(gu_w[l] + FF * H, w.up, FF * H);
      copy(kns + l * HD, w.kn, HD);
      ckm[l] = new TensorMap(ctx_kv + l * KV2, n, KVH * HD, L * KV2);
      cvm[l] = new TensorMap(ctx_kv + l * KV2 + KV2 / 2, n, KVH * HD, L * KV2);
    }
    qm = new TensorMap(qkv, m, QH * HD, QKV, 16);
    bkm = new TensorMap(qkv + QH * HD, m, KVH * HD, QKV);
    bvm = new TensorMap(qkv + (QH + KVH) * HD, m, KVH * HD, QKV);
    zm = new TensorMap(z, rows, H, H), wm = new TensorMap(g.head, V, H, H);
    CHECK(cudaFuncSetAttribute(fast_attention_128, cudaFuncAttributeMaxDynamicSharedMemorySize, kAttentionShared128));
    CHECK(cudaFuncSetAttribute(fast_head, cudaFuncAttributeMaxDynamicSharedMemorySize, kHeadShared));
    CHECK(cudaFuncSetAttribute(fast_head_begin, cudaFuncAttributeMaxDynamicSharedMemorySize, kBeginShared));
    fc_plan = lt.plan(g.taps, g.fc, fc_out, n, H, TAPS * H, false);
    kv_plan = lt.plan(ctx, ctx_kv_w, ctx_kv, n, L * KV2, H, false);
    qkv_plan = lt.plan(u, qkv_w[0], qkv, m, QKV, H, false);
    o_plan = lt.plan(att, g.layers[0].o, x, m, H, QH * HD, true);
    gu_plan = lt.plan(u, gu_w[0], gu, m, 2 * FF, H, false);
    down_plan = lt.plan(act, g.layers[0].down, x, m, H, FF, true);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int part = 0; part < 4; part++) {
      cudaGraph_t graph;
      CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      if (part == 0 || part == 3) context(stream);
      if (part == 1 || part == 3) draft(stream);
      if (part == 2 || part == 3) head(stream);
      CHECK(cudaStreamEndCapture(stream, &graph));
      CHECK(cudaGraphInstantiate(&graphs[part], graph, 0));
    }
    CHECK(cudaDeviceSynchronize());
  }

  void norm(bf16* to, const bf16* from, const bf16* w, long count, long group, cudaStream_t s) {
    fast_rmsnorm<<<count, 160, 0, s>>>(to, from, w, H, kEps, 0.0, group);
  }
  void ctx_rope(cudaStream_t s) {
    fast_norm_rope<<<dim3(n * KVH / 8, L), 256, 0, s>>>(ctx_kv, L * KV2, KV2, kns, KVH, nullptr, 0, ctx_table, n, kEps);
  }
  void context(cudaStream_t s) {
    fast_rope_table<<<(n * 64 + 255) / 256, 256, 0, s>>>(ctx_table, g.ctx_pos, n, HD, kTheta);
    lt.run(fc_plan, g.taps, g.fc, fc_out, s);
    norm(ctx, fc_out, g.hidden_norm, n, 0, s);
    lt.run(kv_plan, ctx, ctx_kv_w, ctx_kv, s);
    ctx_rope(s);
  }
  void rope(long l, cudaStream_t s) {
    fast_norm_rope<<<(m * (QH + KVH) + 7) / 8, 256, 0, s>>>(qkv, QKV, 0, g.layers[l].qn, QH, g.layers[l].kn, KVH, table, m, kEps);
  }
  void attention(long l, cudaStream_t s) {
    fast_attention_128<<<dim3(m / B, KVH), 160, kAttentionShared128, s>>>(*qm, *ckm[l], *cvm[l], *bkm, *bvm, g.spans, tiles, att, QH * HD,
                                                                        QH / KVH, B, 1 / std::sqrt((double)HD));
  }
  void silu(cudaStream_t s) { fast_silu_mul<<<(m * FF / 8 + 255) / 256, 256, 0, s>>>(act, gu, m, FF); }
  void draft(cudaStream_t s) {
    fast_rope_table<<<(m * 64 + 255) / 256, 256, 0, s>>>(table, g.pos, m, HD, kTheta);
    CHECK(cudaMemcpyAsync(x, g.x, m * H * 2, cudaMemcpyDeviceToDevice, s));
    for (long l = 0; l < L; l++) {
      const auto& w = g.layers[l];
      norm(u, x, w.n1, m, 0, s);
      lt.run(qkv_plan, u, qkv_w[l], qkv, s);
      rope(l, s);
      attention(l, s);
      lt.run(o_plan, att, w.o, x, s);
      norm(u, x, w.n2, m, 0, s);
      lt.run(gu_plan, u, gu_w[l], gu, s);
      silu(s);
      lt.run(down_plan, act, w.down, x, s);
    }
    norm(z, x, g.norm, m, B, s);
  }
  void head_begin(cudaStream_t s) {
    fast_head_begin<<<(rows + kBeginRows - 1) / kBeginRows, 128, kBeginShared, s>>>(z, g.head, g.labels, label_logit, best, ranks, rows, H, K);
  }
  void head_product(cudaStream_t s) {
    fast_head<<<multiprocessors() / 2 * 2, 384, kHeadShared, s>>>(*zm, *wm, parts, best, ranks, g.labels, label_logit, rows, V, H, K);
  }
  void head_merge(cudaStream_t s) {
    fast_head_merge<<<(rows + 15) / 16, dim3(16, 32), 0, s>>>(parts, nullptr, best, ranks, g.labels, nullptr, lse, ids, logits, rank, nullptr, nullptr,
                                                             nullptr, rows, (V + 255) / 256, K);
  }
  void head(cudaStream_t s) { head_begin(s), head_product(s), head_merge(s); }
};

extern "C" Stage* stage_new(long n, long anchors, const uint64_t* p) {
  Given g;
  static_assert(sizeof g == (10 + 11 * L) * 8, "as many pointers as stage.py gives");
  std::memcpy(&g, p, sizeof g);
  return new Stage(n, anchors, g);
}

extern "C" void stage_launch(Stage* s, int part, cudaStream_t stream) { CHECK(cudaGraphLaunch(s->graphs[part], stream)); }

// stage_get is one of the results, by number.
extern "C" uint64_t stage_get(Stage* s, int what) {
  const void* all[] = {s->z.p, s->lse.p, s->logits.p, s->ids.p, s->label_logit.p, s->rank.p, s->ctx_kv.p};
  return (uint64_t)all[what];
}

extern "C" long stage_head_bytes(Stage* s) {
  return 8 * (s->parts.n + s->best.n) + 4 * (s->ranks.n + s->label_logit.n + s->lse.n + s->logits.n + s->ids.n + s->rank.n);
}

// stage_shares prints each kernel's time by itself, 8 in a row between two
// events, and how often a stage runs it.
extern "C" void stage_shares(Stage* s) {
  auto& w = s->g.layers[1];
  cudaStream_t t = 0;
  double sum = 0;
  auto line = [&](const char* name, int times, double flop, auto f) {
    double ms = median_ms([&] { for (int i = 0; i < 8; i++) f(); }, 5, 1) / 8;
    sum += ms * times;
    printf("  %-34s %2d x %8.4f ms = %8.4f", name, times, ms, ms * times);
    printf(flop > 0 ? "  %4.0f TFLOP/s\n" : "\n", flop / ms / 1e9);
  };
  auto mm = [](double a, double b, double c) { return 2 * a * b * c; };
  printf("shares, ctx %ld, anchors %ld:\n", s->n, s->m / B);
  line("context: fc (cublasLt)", 1, mm(s->n, H, TAPS * H), [&] { s->lt.run(s->fc_plan, s->g.taps, s->g.fc, s->fc_out, t); });
  line("context: norm", 1, 0, [&] { s->norm(s->ctx, s->fc_out, s->g.hidden_norm, s->n, 0, t); });
  line("context: all K, V (cublasLt)", 1, mm(s->n, L * KV2, H), [&] { s->lt.run(s->kv_plan, s->ctx, s->ctx_kv_w, s->ctx_kv, t); });
  line("context: norm and rope of K", 1, 0, [&] { s->ctx_rope(t); });
  line("draft: norm", 2 * L + 1, 0, [&] { s->norm(s->u, s->x, w.n1, s->m, 0, t); });
  line("draft: q, k, v (cublasLt)", L, mm(s->m, QKV, H), [&] { s->lt.run(s->qkv_plan, s->u, s->qkv_w[1], s->qkv, t); });
  line("draft: norm and rope of q, k", L, 0, [&] { s->rope(1, t); });
  line("draft: attention", L, 0, [&] { s->attention(1, t); });
  line("draft: o and residual (cublasLt)", L, mm(s->m, H, QH * HD), [&] { s->lt.run(s->o_plan, s->att, w.o, s->x, t); });
  line("draft: gate, up (cublasLt)", L, mm(s->m, 2 * FF, H), [&] { s->lt.run(s->gu_plan, s->u, s->gu_w[1], s->gu, t); });
  line("draft: silu mul", L, 0, [&] { s->silu(t); });
  line("draft: down and residual (cublasLt)", L, mm(s->m, H, FF), [&] { s->lt.run(s->down_plan, s->act, w.down, s->x, t); });
  line("head: begin", 1, 0, [&] { s->head_begin(t); });
  line("head: product and reduction", 1, mm(s->rows, V, H), [&] { s->head_begin(t), s->head_product(t); });
  line("head: merge", 1, 0, [&] { s->head_merge(t); });
  printf("  %-34s %26.4f (the product's line holds begin once more)\n", "sum", sum);
  fflush(stdout);
}

extern "C" void stage_free(Stage* s) {
  CHECK(cudaDeviceSynchronize());
  for (auto g : s->graphs) CHECK(cudaGraphExecDestroy(g));
  for (auto* m : s->ckm) delete m;
  for (auto* m : s->cvm) delete m;
  for (auto* m : {s->qm, s->bkm, s->bvm, s->zm, s->wm}) delete m;
  delete s;
}
