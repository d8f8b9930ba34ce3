// The passes between products, and the tap packer: checks against the host in
// double precision, then times beside a copy of as many bytes.
//
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -o ops ops.cu -ldl
//   ./ops [small]
#include "bench.cuh"
#include "passes.cuh"

static double f(bf16 v) { return __bfloat162float(v); }

static void close(const std::string& name, const std::vector<bf16>& got, const std::vector<double>& want) {
  double worst = 0;
  for (size_t i = 0; i < got.size(); i++) {
    double gap = std::fabs(f(got[i]) - want[i]) / (1e-3 + std::fabs(want[i]));
    worst = gap == gap ? std::max(worst, gap) : INFINITY;
  }
  printf("%-28s worst relative error %.1e\n", name.c_str(), worst);
  expect(worst < 5e-3, name);  // half a unit in the last of bf16's 8 bits is 2e-3, near zero a little more
}

static void check_norm(long rows, long cols, double gain, long group) {
  Device<bf16> x(rows * cols), w(cols), out((group ? rows / group * (group - 1) : rows) * cols);
  normal(x, x.n, 3, 1), normal(w, w.n, 1, 2);
  auto hx = x.get(), hw = w.get();
  std::vector<double> want;
  for (long r = 0; r < rows; r++) {
    if (group && r % group == 0) continue;
    double s = 0;
    for (long c = 0; c < cols; c++) s += f(hx[r * cols + c]) * f(hx[r * cols + c]);
    for (long c = 0; c < cols; c++) want.push_back(f(hx[r * cols + c]) / std::sqrt(s / cols + 1e-6) * (gain + f(hw[c])));
  }
  int threads = (int)((cols / 8 + 3) / 4 + 31) / 32 * 32;
  fast_rmsnorm<<<rows, threads>>>(out, x, w, cols, 1e-6, gain, group);
  CHECK(cudaDeviceSynchronize());
  close("rmsnorm", out.get(), want);
}

static void check_rope(long rows, long heads, long heads2, long groups) {
  long step = (heads + heads2) * 128 + 64, stride = groups * step + 8;
  Device<bf16> x(rows * stride), w(groups * 128), w2(groups * 128);
  Device<float2> table(rows * 64);
  std::vector<int> pos(rows);
  for (long r = 0; r < rows; r++) pos[r] = (int)(r * r * 37 % 262144);
  Device<int> dp(pos);
  normal(x, x.n, 2, 3), normal(w, w.n, 1, 4), normal(w2, w2.n, 1, 5);
  auto hx = x.get(), hw = w.get(), hw2 = w2.get();
  std::vector<double> want(hx.size());
  for (size_t i = 0; i < hx.size(); i++) want[i] = f(hx[i]);
  for (long r = 0; r < rows; r++)
    for (long g = 0; g < groups; g++)
      for (long h = 0; h < heads + heads2; h++) {
        long at = r * stride + g * step + h * 128;
        double s = 0, y[128];
        for (int i = 0; i < 128; i++) s += f(hx[at + i]) * f(hx[at + i]);
        for (int i = 0; i < 128; i++) y[i] = f(hx[at + i]) / std::sqrt(s / 128 + 1e-6) * f((h < heads ? hw : hw2)[g * 128 + i]);
        for (int i = 0; i < 64; i++) {
          double a = pos[r] * std::pow(1e7, -2.0 * i / 128), c = std::cos(a), n = std::sin(a);
          want[at + i] = y[i] * c - y[i + 64] * n, want[at + i + 64] = y[i + 64] * c + y[i] * n;
        }
      }
  fast_rope_table<<<(rows * 64 + 255) / 256, 256>>>(table, dp, rows, 128, 1e7);
  fast_norm_rope<<<dim3((rows * (heads + heads2) + 7) / 8, groups), 256>>>(x, stride, step, w, heads, w2, heads2, table, rows, 1e-6);
  CHECK(cudaDeviceSynchronize());
  close("norm and rope", x.get(), want);
}

static void check_silu(long rows, long width) {
  Device<bf16> x(rows * 2 * width), out(rows * width);
  normal(x, x.n, 3, 6);
  auto hx = x.get();
  std::vector<double> want;
  for (long r = 0; r < rows; r++)
    for (long c = 0; c < width; c++) {
      double g = f(hx[r * 2 * width + c]);
      want.push_back(g / (1 + std::exp(-g)) * f(hx[r * 2 * width + width + c]));
    }
  fast_silu_mul<<<(rows * width / 8 + 255) / 256, 256>>>(out, x, rows, width);
  CHECK(cudaDeviceSynchronize());
  close("silu mul", out.get(), want);
}

struct Pack {
  long rows, layers, cols, tall;
  Device<bf16> source, out;
  Device<bf16*> sources;
  Device<long long> strides;
  Device<int> ids;
  Device<float> norms;
  Device<unsigned> bad;
  Device<unsigned long long> sums;
  Pack(long rows, long layers, long cols)
      : rows(rows), layers(layers), cols(cols), tall(rows + 5), source(layers * tall * (cols + 64)), out(rows * layers * cols), sources(layers),
        strides(layers), ids(rows), norms(rows * layers), bad(rows * layers), sums(rows * layers) {
    normal(source, source.n, 2, 7);
    std::vector<bf16*> s;
    std::vector<int> id;
    for (long l = 0; l < layers; l++) s.push_back(source.p + l * tall * (cols + 64));
    for (long r = 0; r < rows; r++) id.push_back((int)((r * 7 + 3) % tall));
    sources.put(s), strides.put(std::vector<long long>(layers, cols + 64)), ids.put(id);
  }
  void run() {
    fast_pack<<<(rows * layers + 7) / 8, 256>>>(out, sources, strides, ids, norms, bad, sums, rows, layers, cols);
  }
};

static void check_pack(long rows, long layers, long cols) {
  Pack p(rows, layers, cols);
  auto hs = p.source.get();
  auto ids = p.ids.get();
  long strange = layers > 1 ? 1 : 0;
  hs[(strange * p.tall + ids[0]) * (cols + 64) + 5] = __float2bfloat16(NAN);
  hs[(strange * p.tall + ids[0]) * (cols + 64) + cols - 1] = __float2bfloat16(-INFINITY);
  p.source.put(hs);
  p.run();
  CHECK(cudaDeviceSynchronize());
  auto out = p.out.get();
  auto norms = p.norms.get();
  auto bad = p.bad.get();
  auto sums = p.sums.get();
  bool same = true, counts = true, checks = true, close = true;
  for (long r = 0; r < rows; r++)
    for (long l = 0; l < layers; l++) {
      const bf16 *a = &hs[(l * p.tall + ids[r]) * (cols + 64)], *b = &out[(r * layers + l) * cols];
      same = same && !std::memcmp(a, b, cols * 2);
      double s = 0;
      unsigned n = 0;
      unsigned long long c = 0;
      for (long i = 0; i < cols; i++) s += f(a[i]) * f(a[i]), n += !std::isfinite(f(a[i]));
      for (long i = 0; i < cols / 2; i++) {
        uint32_t w;
        std::memcpy(&w, a + 2 * i, 4);
        c += (unsigned long long)w * (unsigned)(2 * i + 1);
      }
      long at = r * layers + l;
      counts = counts && bad[at] == n, checks = checks && sums[at] == c;
      close = close && (n ? !std::isfinite(norms[at]) : std::fabs(norms[at] - std::sqrt(s)) <= 1e-5 * std::sqrt(s));
    }
  expect(same, "pack: bytes"), expect(counts, "pack: not finite"), expect(checks, "pack: checksums"), expect(close, "pack: norms");
  printf("pack %ld rows of %ld layers of %ld: checked\n", rows, layers, cols);
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  print_card();
  check_norm(7, 5120, 0, 0), check_norm(48, 1024, 1, 16), check_norm(3, 264, 0, 0);
  check_rope(9, 4, 2, 1), check_rope(5, 3, 0, 4);
  check_silu(5, 264);
  check_pack(9, 5, 5120), check_pack(3, 1, 72);
  if (argc < 2) {
    Device<uint8_t> from(4ull << 30), to(4ull << 30);
    float copy = median_ms([&] { CHECK(cudaMemcpyAsync(to, from, from.n, cudaMemcpyDeviceToDevice)); });
    double rate = 2.0 * from.n / copy / 1e9;
    printf("copy %.2f TB/s\n", rate);
    for (long rows : {2048, 32768}) {
      Pack p(rows, 5, 5120);
      float ms = median_ms([&] { p.run(); });
      double tb = 2.0 * 2 * rows * 5 * 5120 / ms / 1e9;
      printf("pack %ld rows of 5 layers: %.4f ms, %.2f TB/s, %.0f %% of copy\n", rows, ms, tb, 100 * tb / rate);
    }
  }
  printf(failures ? "%d FAILED\n" : "all checks hold\n", failures);
  return failures != 0;
}
