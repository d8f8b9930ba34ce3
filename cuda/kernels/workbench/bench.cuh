// What the workbench programs share: checked calls, tensor maps, random
// inputs, poisoned outputs, medians of event times, and cuBLAS at run time.
#pragma once
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#define CHECK(call)                                                                             \
  do {                                                                                          \
    auto status_ = (call);                                                                      \
    if (status_ != 0) {                                                                         \
      fprintf(stderr, "%s:%d: %s gave %d\n", __FILE__, __LINE__, #call, (int)status_);          \
      fprintf(stderr, "%s\n", cudaGetErrorString(cudaGetLastError()));                          \
      exit(1);                                                                                  \
    }                                                                                           \
  } while (0)

static int failures = 0;

// expect counts a failure and says what failed.
static bool expect(bool ok, const std::string& what) {
  if (!ok) failures++, printf("FAIL %s\n", what.c_str());
  return ok;
}

template <typename T>
struct Device {
  T* p = nullptr;
  size_t n = 0;
  explicit Device(size_t count) : n(count) {
    CHECK(cudaMalloc(&p, std::max<size_t>(n, 1) * sizeof(T)));
    poison();
  }
  explicit Device(const std::vector<T>& v) : Device(v.size()) { put(v); }
  ~Device() { cudaFree(p); }
  Device(const Device&) = delete;
  void poison() { CHECK(cudaMemset(p, 0xff, n * sizeof(T))); }
  void put(const std::vector<T>& v) { CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice)); }
  std::vector<T> get() const {
    std::vector<T> v(n);
    CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
  operator T*() const { return p; }
};

// TensorMap describes a [rows, cols] bf16 matrix, rows stride values apart, to
// the copy engine, in boxes of box_rows x 64; it lies in global memory.
struct TensorMap {
  Device<uint8_t> mem;
  TensorMap(const void* p, uint64_t rows, uint64_t cols, uint64_t stride, uint32_t box_rows = 64) : mem(256) {
    static PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
    if (!encode) {
      cudaDriverEntryPointQueryResult found;
      CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&encode, 12000, cudaEnableDefault, &found));
    }
    alignas(64) CUtensorMap map;
    cuuint64_t dims[2] = {cols, rows}, strides[1] = {stride * 2};
    cuuint32_t box[2] = {64, box_rows}, steps[2] = {1, 1};
    CHECK(encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)p, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    CHECK(cudaMemcpy(mem.p, &map, sizeof map, cudaMemcpyHostToDevice));
  }
  operator const void*() const { return mem.p; }
};

__device__ inline uint32_t hash32(uint64_t x) {
  x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull;
  return (uint32_t)(x >> 32);
}

// fill_normal draws gaussian values of the given deviation.
__global__ void fill_normal(__nv_bfloat16* p, size_t n, float deviation, uint64_t seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    float u = (hash32(seed * 0x9e3779b97f4a7c15ull + 2 * i) + 1.0f) * 2.3283064e-10f, v = hash32(seed * 0x9e3779b97f4a7c15ull + 2 * i + 1) * 2.3283064e-10f;
    p[i] = __float2bfloat16(deviation * sqrtf(-2 * logf(fminf(u, 1.0f))) * cospif(2 * v));
  }
}

static void normal(__nv_bfloat16* p, size_t n, float deviation, uint64_t seed) {
  fill_normal<<<1024, 256>>>(p, n, deviation, seed);
  CHECK(cudaGetLastError());
}

// median_ms is the median time of n runs of f, launched on the default stream.
template <typename F>
float median_ms(F f, int n = 15, int warm = 4) {
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  for (int i = 0; i < warm; i++) f();
  CHECK(cudaDeviceSynchronize());
  std::vector<float> t(n);
  for (auto& ms : t) {
    CHECK(cudaEventRecord(a));
    f();
    CHECK(cudaEventRecord(b));
    CHECK(cudaEventSynchronize(b));
    CHECK(cudaEventElapsedTime(&ms, a, b));
  }
  CHECK(cudaGetLastError());
  CHECK(cudaEventDestroy(a));
  CHECK(cudaEventDestroy(b));
  std::sort(t.begin(), t.end());
  return t[n / 2];
}

// Lt is cuBLASLt loaded at run time, for plain matrix products:
// out[M,N] = a[M,K]·w[N,K]ᵀ, bf16 in and out, float32 sums, plus out itself
// when add. A plan is made once a shape: the first few of the library's
// candidates are timed and the fastest stays.
struct Lt {
  void* lib = nullptr;
  cublasLtHandle_t handle = nullptr;
  Device<uint8_t> workspace;
  struct Plan {
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t w, a, out;
    cublasLtMatmulAlgo_t algo;
    size_t space;
    float ms;
    bool add;
  };
#define LT(name) ((decltype(&name))symbol(#name))
  void* symbol(const char* name) {
    void* s = dlsym(lib, name);
    if (!s) fprintf(stderr, "cublasLt has no %s\n", name), exit(1);
    return s;
  }
  Lt() : workspace(64 << 20) {
    lib = dlopen("libcublasLt.so.13", RTLD_NOW);
    if (!lib) fprintf(stderr, "loading cublasLt: %s\n", dlerror()), exit(1);
    CHECK(LT(cublasLtCreate)(&handle));
  }
  Plan plan(const void* a, const void* w, void* out, int64_t m, int64_t n, int64_t k, bool add, int candidates = 8, int64_t ldo = 0, cudaDataType type = CUDA_R_16BF) {
    Plan p;
    p.add = add;
    if (ldo == 0) ldo = n;
    CHECK(LT(cublasLtMatmulDescCreate)(&p.op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublasOperation_t t = CUBLAS_OP_T;
    CHECK(LT(cublasLtMatmulDescSetAttribute)(p.op, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof t));
    // Column-major: outᵀ[N,M] = w[K,N]ᵀ · a[K,M].
    CHECK(LT(cublasLtMatrixLayoutCreate)(&p.w, CUDA_R_16BF, k, n, k));
    CHECK(LT(cublasLtMatrixLayoutCreate)(&p.a, CUDA_R_16BF, k, m, k));
    CHECK(LT(cublasLtMatrixLayoutCreate)(&p.out, type, n, m, ldo));
    cublasLtMatmulPreference_t pref;
    CHECK(LT(cublasLtMatmulPreferenceCreate)(&pref));
    size_t most = workspace.n;
    CHECK(LT(cublasLtMatmulPreferenceSetAttribute)(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most));
    std::vector<cublasLtMatmulHeuristicResult_t> got(candidates);
    int found = 0;
    CHECK(LT(cublasLtMatmulAlgoGetHeuristic)(handle, p.op, p.w, p.a, p.out, p.out, pref, candidates, got.data(), &found));
    if (!found) fprintf(stderr, "cublasLt knows no way for %ld x %ld x %ld\n", (long)m, (long)n, (long)k), exit(1);
    p.ms = INFINITY;
    for (int i = 0; i < found; i++) {
      if (got[i].state != CUBLAS_STATUS_SUCCESS) continue;
      Plan q = p;
      q.algo = got[i].algo, q.space = got[i].workspaceSize, q.add = false;
      q.ms = found == 1 ? 0 : median_ms([&] { run(q, a, w, out); }, 5, 2);
      if (q.ms < p.ms) p = q;
    }
    p.add = add;
    CHECK(LT(cublasLtMatmulPreferenceDestroy)(pref));
    return p;
  }
  void run(const Plan& p, const void* a, const void* w, void* out, cudaStream_t stream = 0) {
    static auto matmul = LT(cublasLtMatmul);
    float one = 1, beta = p.add ? 1 : 0;
    CHECK(matmul(handle, p.op, &one, w, p.w, a, p.a, &beta, out, p.out, out, p.out, &p.algo, workspace, p.space, stream));
  }
};

static int multiprocessors() {
  int n, dev;
  CHECK(cudaGetDevice(&dev));
  CHECK(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, dev));
  return n;
}

static void print_card() {
  cudaDeviceProp prop;
  int driver, runtime, dev;
  CHECK(cudaGetDevice(&dev));
  CHECK(cudaGetDeviceProperties(&prop, dev));
  CHECK(cudaDriverGetVersion(&driver));
  CHECK(cudaRuntimeGetVersion(&runtime));
  printf("card %s, %d multiprocessors, driver api %d, runtime %d\n", prop.name, prop.multiProcessorCount, driver, runtime);
}
