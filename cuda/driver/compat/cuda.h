/*
 * Found before CUDA's own cuda.h (CGO_CFLAGS=-I.../cuda/driver/compat), so that
 * gorgonia.org/cu v0.9.6 builds against CUDA 13: five calls changed shape
 * there. The driver still exports the older forms, which are declared here.
 */
#ifndef DRAFTSCOPE_COMPAT_CUDA_H
#define DRAFTSCOPE_COMPAT_CUDA_H

#include_next <cuda.h>

#undef cuCtxCreate
#define cuCtxCreate cuCtxCreate_v2
CUresult CUDAAPI cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev);

#undef cuMemAdvise
CUresult CUDAAPI cuMemAdvise(CUdeviceptr ptr, size_t count, CUmem_advise advice, CUdevice device);

#undef cuMemPrefetchAsync
CUresult CUDAAPI cuMemPrefetchAsync(CUdeviceptr ptr, size_t count, CUdevice device, CUstream stream);

#undef cuGraphAddDependencies
CUresult CUDAAPI cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count);

#undef cuGraphGetEdges
CUresult CUDAAPI cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count);

#endif
