// Command compile makes the PTX of the kernels whose source changed, and
// rewrites kernels.sum. Run it in cuda/kernels:
//
//	go run ./compile [-nvcc PATH] [-all] [NAME...]
//
// .ci/cuda-headers nvcc installs the compiler that it wants.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/cuda/kernels"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("compile: ")
	nvcc := flag.String("nvcc", "nvcc", "the compiler, of CUDA "+kernels.Release)
	all := flag.Bool("all", false, "compile every kernel, changed or not")
	flag.Parse()
	if err := compile(*nvcc, *all, flag.Args()); err != nil {
		log.Fatal(err)
	}
}

// compile makes the PTX of the kernels named, or of all when none is.
func compile(nvcc string, all bool, only []string) error {
	said, err := exec.Command(nvcc, "--version").Output()
	if err != nil {
		return fmt.Errorf("asking %s for its version: %w", nvcc, err)
	}
	if !bytes.Contains(said, []byte("V"+kernels.Release)) {
		return fmt.Errorf("%s is not CUDA %s; .ci/cuda-headers nvcc installs it", nvcc, kernels.Release)
	}
	here := os.DirFS(".")
	names, err := kernels.Names(here)
	if err != nil {
		return err
	}
	old, err := kernels.ReadSum(here)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	var lines []kernels.Line
	for _, name := range names {
		i := slices.IndexFunc(old, func(l kernels.Line) bool { return l.Name == name })
		if len(only) > 0 && !slices.Contains(only, name) {
			if i >= 0 {
				lines = append(lines, old[i])
			}
			continue
		}
		now, err := kernels.LineOf(here, name)
		if all || err != nil || i < 0 || now != old[i] {
			log.Printf("%s.cu", name)
			args := append(kernels.Flags(name), "-o", name+".ptx", name+".cu")
			if out, err := exec.Command(nvcc, args...).CombinedOutput(); err != nil {
				return fmt.Errorf("running nvcc %s: %w\n%s", strings.Join(args, " "), err, out)
			}
			if now, err = kernels.LineOf(here, name); err != nil {
				return err
			}
		}
		lines = append(lines, now)
	}
	return os.WriteFile(kernels.SumFile, kernels.FormatSum(lines), 0o644)
}
