//go:build !amd64 || purego

package cpu

// kernels are the inner loops of this build.
var kernels plain

// kernelName says which they are.
func kernelName() string { return "gonum" }
