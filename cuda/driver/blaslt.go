//go:build cuda && cgo

package driver

/*
#include <dlfcn.h>
#include <stdint.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

// What is used of cublasLt.h, which is not among the headers that building
// needs: opaque handles, and numbers that have not changed since CUDA 11.
typedef struct { uint64_t data[8]; } lt_algo;
typedef struct {
  lt_algo algo;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
} lt_found;

enum { COMPUTE_32F = 68, R_32F = 0, R_16BF = 14, DESC_TRANSA = 3, OP_T = 1, PREF_WORKSPACE = 1, PREF_REDUCTION = 3,
       CONFIG_SPLITK = 2, CONFIG_REDUCTION = 3 };

static int (*lt_create)(void **);
static int (*lt_destroy)(void *);
static int (*lt_desc)(void **, int, int);
static int (*lt_desc_free)(void *);
static int (*lt_desc_set)(void *, int, const void *, size_t);
static int (*lt_layout)(void **, int, uint64_t, uint64_t, int64_t);
static int (*lt_layout_free)(void *);
static int (*lt_pref)(void **);
static int (*lt_pref_free)(void *);
static int (*lt_pref_set)(void *, int, const void *, size_t);
static int (*lt_heuristic)(void *, void *, void *, void *, void *, void *, void *, int, lt_found *, int *);
static int (*lt_config)(const lt_algo *, int, void *, size_t, size_t *);
static int (*lt_matmul)(void *, void *, const void *, const void *, void *, const void *, void *, const void *,
                        const void *, void *, void *, void *, const lt_algo *, void *, size_t, void *);
static size_t (*lt_version)(void);

// Loads the library; why is not empty where that fails.
static void lt_load(char *why, size_t size) {
  void *lib = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
  if (lib == NULL) {
    snprintf(why, size, "%s", dlerror());
    return;
  }
  const struct { const char *name; void **to; } calls[] = {
    {"cublasLtCreate", (void **)&lt_create}, {"cublasLtDestroy", (void **)&lt_destroy},
    {"cublasLtMatmulDescCreate", (void **)&lt_desc}, {"cublasLtMatmulDescDestroy", (void **)&lt_desc_free},
    {"cublasLtMatmulDescSetAttribute", (void **)&lt_desc_set},
    {"cublasLtMatrixLayoutCreate", (void **)&lt_layout}, {"cublasLtMatrixLayoutDestroy", (void **)&lt_layout_free},
    {"cublasLtMatmulPreferenceCreate", (void **)&lt_pref}, {"cublasLtMatmulPreferenceDestroy", (void **)&lt_pref_free},
    {"cublasLtMatmulPreferenceSetAttribute", (void **)&lt_pref_set},
    {"cublasLtMatmulAlgoGetHeuristic", (void **)&lt_heuristic},
    {"cublasLtMatmulAlgoConfigGetAttribute", (void **)&lt_config}, {"cublasLtMatmul", (void **)&lt_matmul},
    {"cublasLtGetVersion", (void **)&lt_version},
  };
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
    if ((*calls[i].to = dlsym(lib, calls[i].name)) == NULL)
      snprintf(why, size, "libcublasLt.so.13 has no %s", calls[i].name);
}

// A row-major product dst[m,n] = a[m,k] w[n,k]^T is, in cuBLAS' columns,
// dst^T[n,m] = w a^T.
typedef struct {
  void *desc, *w, *a, *dst;
} lt_product;

static void lt_drop(lt_product *p) {
  if (p->desc) lt_desc_free(p->desc);
  if (p->w) lt_layout_free(p->w);
  if (p->a) lt_layout_free(p->a);
  if (p->dst) lt_layout_free(p->dst);
}

static int lt_describe(lt_product *p, int type, int64_t m, int64_t n, int64_t k, int64_t dst_stride, int64_t a_stride, int64_t w_stride) {
  int op = OP_T, r;
  memset(p, 0, sizeof *p);
  if ((r = lt_desc(&p->desc, COMPUTE_32F, R_32F)) || (r = lt_desc_set(p->desc, DESC_TRANSA, &op, sizeof op)) ||
      (r = lt_layout(&p->w, R_16BF, k, n, w_stride)) || (r = lt_layout(&p->a, R_16BF, k, m, a_stride)) ||
      (r = lt_layout(&p->dst, type, n, m, dst_stride)))
    lt_drop(p);
  return r;
}

// Finds the ways to multiply that cuBLAS knows, what it prefers first, that
// need no workspace and split no sum: at most size of them.
static int lt_find(void *handle, int type, int64_t m, int64_t n, int64_t k, lt_algo *algos, int size, int *count) {
  lt_product p;
  void *pref = NULL;
  lt_found found[64];
  int all = 0, r = lt_describe(&p, type, m, n, k, (n + 7) / 8 * 8, k, k);
  size_t workspace = 0;
  uint32_t schemes = 0;
  *count = 0;
  if (r)
    return r;
  if (!(r = lt_pref(&pref)) && !(r = lt_pref_set(pref, PREF_WORKSPACE, &workspace, sizeof workspace)) &&
      !(r = lt_pref_set(pref, PREF_REDUCTION, &schemes, sizeof schemes)))
    r = lt_heuristic(handle, p.desc, p.w, p.a, p.dst, p.dst, pref, 64, found, &all);
  if (pref) lt_pref_free(pref);
  lt_drop(&p);
  if (r)
    return r;
  for (int i = 0; i < all && *count < size; i++) {
    int32_t splits = 1;
    uint32_t scheme = 0;
    size_t written;
    lt_config(&found[i].algo, CONFIG_SPLITK, &splits, sizeof splits, &written);
    lt_config(&found[i].algo, CONFIG_REDUCTION, &scheme, sizeof scheme, &written);
    if (found[i].state == 0 && found[i].workspace == 0 && splits <= 1 && scheme == 0)
      algos[(*count)++] = found[i].algo;
  }
  return *count ? 0 : 15; // CUBLAS_STATUS_NOT_SUPPORTED
}

static int lt_multiply(void *handle, int type, int64_t m, int64_t n, int64_t k, uint64_t dst, int64_t dst_stride, uint64_t a,
                       int64_t a_stride, uint64_t w, int64_t w_stride, int add, const lt_algo *algo, uintptr_t stream) {
  lt_product p;
  float one = 1, keep = add ? 1 : 0;
  int r = lt_describe(&p, type, m, n, k, dst_stride, a_stride, w_stride);
  if (r)
    return r;
  r = lt_matmul(handle, p.desc, &one, (void *)w, p.w, (void *)a, p.a, &keep, (void *)dst, p.dst, (void *)dst, p.dst, algo,
                NULL, 0, (void *)stream);
  lt_drop(&p);
  return r;
}

static int lt_open(void **handle) { return lt_create(handle); }
static int lt_close(void *handle) { return lt_destroy(handle); }
static size_t lt_version_of(void) { return lt_version(); }
*/
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"
)

// ErrNoBLAS marks a machine without cuBLASLt.
var ErrNoBLAS = errors.New("no cuBLASLt (libcublasLt.so.13)")

// BLAS multiplies bf16 matrices by cuBLASLt, which is opened at run time where
// the machine has it.
type BLAS struct {
	card   *Card
	handle unsafe.Pointer
}

// ErrWay marks a product that cuBLASLt refuses.
var ErrWay = errors.New("cuBLASLt refuses")

// Way is one of the ways to multiply that cuBLASLt has for a shape: a tile, an
// order of tiles, a depth of the pipeline.
type Way struct{ algo C.lt_algo }

var loadBLAS = sync.OnceValue(func() string {
	var why [256]C.char
	C.lt_load(&why[0], C.size_t(len(why)))
	return C.GoString(&why[0])
})

// OpenBLAS opens cuBLASLt for the card, on the thread.
func (c *Card) OpenBLAS() (*BLAS, error) {
	if why := loadBLAS(); why != "" {
		return nil, fmt.Errorf("%w: %s; install CUDA's libraries, or name their folder in LD_LIBRARY_PATH", ErrNoBLAS, why)
	}
	b := &BLAS{card: c}
	if code := C.lt_open(&b.handle); code != 0 {
		return nil, fmt.Errorf("%w: starting it: status %d", ErrNoBLAS, int(code))
	}
	return b, nil
}

// Version is the library's, as it counts them.
func (b *BLAS) Version() int { return int(C.lt_version_of()) }

// Close ends the library's use, on the thread.
func (b *BLAS) Close() error {
	if code := C.lt_close(b.handle); code != 0 {
		return fmt.Errorf("closing cuBLASLt: status %d", int(code))
	}
	return nil
}

// Operand is a row-major matrix of Rows x Cols, rows Stride values apart.
type Operand struct {
	At                 Ptr
	Rows, Cols, Stride int
}

// Ways lists ways to multiply rows x k by n x k values, at most size of them, in
// the order of the library's own preference, on the thread. None needs a
// workspace, and none splits a sum. float stands for float32 results.
func (b *BLAS) Ways(rows, n, k int, float bool, size int) ([]*Way, error) {
	algos := make([]C.lt_algo, size)
	var count C.int
	if code := C.lt_find(b.handle, resultType(float), C.int64_t(rows), C.int64_t(n), C.int64_t(k), &algos[0], C.int(size), &count); code != 0 {
		return nil, fmt.Errorf("%w every way to multiply %d rows by %d x %d: status %d", ErrWay, rows, n, k, int(code))
	}
	ways := make([]*Way, count)
	for i := range ways {
		ways[i] = &Way{algos[i]}
	}
	return ways, nil
}

// Product starts dst = a·wᵀ, or adds that to dst, in the given way, on the
// thread. Values are bf16, those of dst float32 where float is set. Rows begin
// on 16 bytes, and there are a multiple of 8 columns.
func (b *BLAS) Product(way *Way, dst, a, w Operand, add, float bool) error {
	if code := C.lt_multiply(b.handle, resultType(float), C.int64_t(a.Rows), C.int64_t(w.Rows), C.int64_t(w.Cols), C.uint64_t(dst.At), C.int64_t(dst.Stride),
		C.uint64_t(a.At), C.int64_t(a.Stride), C.uint64_t(w.At), C.int64_t(w.Stride), C.int(flag(add)), &way.algo, C.uintptr_t(b.card.Stream())); code != 0 {
		return fmt.Errorf("%w to multiply %d x %d by %d x %d: status %d", ErrWay, a.Rows, a.Cols, w.Rows, w.Cols, int(code))
	}
	return nil
}

// resultType is cuBLAS' name for float32 or bf16.
func resultType(float bool) C.int {
	if float {
		return C.R_32F
	}
	return C.R_16BF
}

func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}
