//go:build cuda

package gpu

const reason = "this version has no CUDA kernels yet; use --backend cpu"
