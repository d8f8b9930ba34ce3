// Package driver talks to NVIDIA's driver: it is the only importer of
// gorgonia.org/cu, and adds the few calls which that lacks (pinned memory,
// strided copies, function attributes, launches with arguments of any size,
// the compiler's log of a module).
//
// It is empty without the build tag "cuda". With it, the package needs CUDA's
// headers to build, found behind those in compat (.ci/cuda-headers says how),
// and nothing to link or to start: libcuda.so.1 is opened when the first
// [Card] is. A [Card] is one device seen from one locked OS thread.
package driver
