//go:build !cuda

package gpu

const reason = "this version has no CUDA kernels yet, and was built without the tag cuda; use --backend cpu"
