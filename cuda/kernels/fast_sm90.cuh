// What the fast kernels share: barriers, bulk tensor copies and descriptors of
// sm_90a, in the words of the PTX manual. Nothing here knows a model.
//
// Tiles in shared memory are boxes of 64 rows x 64 bf16 values (128 bytes a
// row, 8 KiB), written by the copy engine with the 128-byte swizzle; a taller
// operand is a stack of boxes.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

typedef __nv_bfloat16 bf16;
typedef unsigned long long u64;

constexpr int kBox = 64 * 64 * 2;  // bytes of a box

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

// --- barriers in shared memory ---

__device__ __forceinline__ void barrier_init(uint32_t bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// barrier_expect arrives and announces bytes that copies will bring.
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// barrier_arrive_at arrives at the same barrier of another block of the cluster.
// Neither it nor barrier_wait names the scope of a cluster: that would put a
// full memory barrier and a cache invalidation into each, and what they order
// here is only the copy engine's and the tensor cores' use of shared memory.
__device__ __forceinline__ void barrier_arrive_at(uint32_t bar, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 far;\nmapa.shared::cluster.u32 far, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [far];\n}\n" ::"r"(bar), "r"(rank)
      : "memory");
}

// barrier_wait returns once the phase with this parity is over.
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nwaiting:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\nbra waiting;\nover:\n}\n" ::"r"(bar), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void barriers_visible() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

// --- the copy engine ---

// map_acquire makes a descriptor in global memory visible to the copy engine.
__device__ __forceinline__ void map_acquire(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

// copy_box brings the box at (column, row) of a tensor; bar counts its bytes.
__device__ __forceinline__ void copy_box(uint32_t dst, const void* map, int col, int row, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(dst),
      "l"(map), "r"(col), "r"(row), "r"(bar)
      : "memory");
}

// copy_box_both brings it to both blocks of a cluster of two, at the same
// place, and counts at the same barrier of each.
__device__ __forceinline__ void copy_box_both(uint32_t dst, const void* map, int col, int row, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(dst),
      "l"(map), "r"(col), "r"(row), "r"(bar), "h"((uint16_t)3)
      : "memory");
}

// prefetch_box brings the box as far as the L2 cache.
__device__ __forceinline__ void prefetch_box(const void* map, int col, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(col), "r"(row) : "memory");
}

// --- warpgroup matrix products ---

// rows_of describes an operand whose rows run along the sum (K-major): row
// groups of 8 lie 1024 bytes apart. 16 values further along is 32 bytes.
__device__ __forceinline__ uint64_t rows_of(uint32_t addr) {
  return (uint64_t)((addr & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

// columns_of describes an operand whose columns run along the sum (MN-major):
// groups of 8 keys lie 1024 bytes apart, the next 64 columns apart bytes.
__device__ __forceinline__ uint64_t columns_of(uint32_t addr, uint32_t apart) {
  return (uint64_t)((addr & 0x3ffff) >> 4) | (uint64_t)(apart >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma_wait returns once at most n groups are under way.
template <int n>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}

// held keeps the compiler from moving uses of sums above a wait.
template <int n>
__device__ __forceinline__ void held(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int n>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}

// --- arithmetic ---

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// one_above is 1 where a > b, else 0, in one instruction.
__device__ __forceinline__ float one_above(float a, float b) {
  float y;
  asm("set.gt.f32.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// quad_* reduce over the four lanes that share a row of sums.
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}
__device__ __forceinline__ int quad_sum(int v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}
__device__ __forceinline__ int quad_min(int v) {
  v = min(v, __shfl_xor_sync(~0u, v, 1));
  return min(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ u64 quad_max(u64 v) {
  v = max(v, __shfl_xor_sync(~0u, v, 1));
  return max(v, __shfl_xor_sync(~0u, v, 2));
}
