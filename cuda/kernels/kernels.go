// Package kernels holds the CUDA code of every operation: one .cu a file, and
// beside it the PTX that nvcc made of it, which is what the program embeds.
// So building draftscope needs no nvcc.
//
// kernels.sum has a line for each, with the hashes of the source (what it
// includes among it, and the compiler line) and of the PTX. [Check] compares
// them with the files; a test runs it, and fails when a source changed and
// its PTX did not. "task kernels" compiles what changed.
package kernels

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
)

// Release is the version of nvcc that the PTX is made with.
const Release = "13.0.88"

// SumFile is the name of the file with the hashes.
const SumFile = "kernels.sum"

// Line is one line of kernels.sum.
type Line struct {
	Name   string // "gemm", for gemm.cu and gemm.ptx
	Source string // hash of the source, of what it includes and of the flags
	PTX    string // hash of the PTX
}

// Flags is the compiler line for a kernel, but for the files. Kernels run on
// Ampere and later; those named fast_* use what only Hopper has.
func Flags(name string) []string {
	arch := "compute_80"
	if strings.HasPrefix(name, "fast_") {
		arch = "compute_90a"
	}
	return []string{"-std=c++17", "-O3", "-ptx", "-arch=" + arch}
}

// Names lists the kernels that have a source in fsys, sorted.
func Names(fsys fs.FS) ([]string, error) {
	files, err := fs.Glob(fsys, "*.cu")
	if err != nil {
		return nil, fmt.Errorf("listing kernels: %w", err)
	}
	for i, f := range files {
		files[i] = strings.TrimSuffix(f, ".cu")
	}
	slices.Sort(files)
	return files, nil
}

// LineOf hashes a kernel as it is in fsys.
func LineOf(fsys fs.FS, name string) (Line, error) {
	source := sha256.New()
	fmt.Fprintln(source, "nvcc", Release, strings.Join(Flags(name), " "))
	files, err := includes(fsys, name+".cu", nil)
	if err != nil {
		return Line{}, err
	}
	for _, f := range files {
		text, err := fs.ReadFile(fsys, f)
		if err != nil {
			return Line{}, fmt.Errorf("hashing kernel %s: %w", name, err)
		}
		fmt.Fprintln(source, f, len(text))
		source.Write(text)
	}
	ptx, err := fs.ReadFile(fsys, name+".ptx")
	if err != nil {
		return Line{}, fmt.Errorf("hashing kernel %s: %w", name, err)
	}
	of := sha256.Sum256(ptx)
	return Line{name, hex.EncodeToString(source.Sum(nil)), hex.EncodeToString(of[:])}, nil
}

var include = regexp.MustCompile(`(?m)^\s*#\s*include\s+"([^"]+)"`)

// includes appends file and, after it, what it includes with quotes.
func includes(fsys fs.FS, file string, seen []string) ([]string, error) {
	if slices.Contains(seen, file) {
		return seen, nil
	}
	text, err := fs.ReadFile(fsys, file)
	if err != nil {
		return nil, fmt.Errorf("reading a kernel's source: %w", err)
	}
	seen = append(seen, file)
	for _, m := range include.FindAllSubmatch(text, -1) {
		if seen, err = includes(fsys, path.Join(path.Dir(file), string(m[1])), seen); err != nil {
			return nil, err
		}
	}
	return seen, nil
}

// ReadSum reads kernels.sum.
func ReadSum(fsys fs.FS) ([]Line, error) {
	text, err := fs.ReadFile(fsys, SumFile)
	if err != nil {
		return nil, fmt.Errorf("reading the kernels' hashes: %w", err)
	}
	var lines []Line
	for row := range bytes.Lines(text) {
		fields := strings.Fields(string(row))
		if len(fields) != 3 {
			return nil, fmt.Errorf("reading %s: line %d has %d fields, not a name and two hashes", SumFile, len(lines)+1, len(fields))
		}
		lines = append(lines, Line{fields[0], fields[1], fields[2]})
	}
	return lines, nil
}

// FormatSum writes lines as ReadSum reads them.
func FormatSum(lines []Line) []byte {
	var out bytes.Buffer
	for _, l := range lines {
		fmt.Fprintln(&out, l.Name, l.Source, l.PTX)
	}
	return out.Bytes()
}

// Check reports every kernel of fsys whose PTX is not what nvcc made of its
// present source.
func Check(fsys fs.FS) error {
	names, err := Names(fsys)
	if err != nil {
		return err
	}
	sum, err := ReadSum(fsys)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		i := slices.IndexFunc(sum, func(l Line) bool { return l.Name == name })
		now, err := LineOf(fsys, name)
		switch {
		case err != nil:
			errs = append(errs, err)
		case i < 0:
			errs = append(errs, fmt.Errorf("%s.cu is not in %s; run task kernels", name, SumFile))
		case now.Source != sum[i].Source:
			errs = append(errs, fmt.Errorf("%s.cu, what it includes or its compiler line changed since %s.ptx was made; run task kernels", name, name))
		case now.PTX != sum[i].PTX:
			errs = append(errs, fmt.Errorf("%s.ptx is not what nvcc made of %s.cu; run task kernels", name, name))
		}
	}
	for _, l := range sum {
		if !slices.Contains(names, l.Name) {
			errs = append(errs, fmt.Errorf("%s.cu is gone, and still in %s; run task kernels", l.Name, SumFile))
		}
	}
	ptx, err := fs.Glob(fsys, "*.ptx")
	for _, f := range ptx {
		if !slices.Contains(names, strings.TrimSuffix(f, ".ptx")) {
			errs = append(errs, fmt.Errorf("%s has no source", f))
		}
	}
	return errors.Join(append(errs, err)...)
}
