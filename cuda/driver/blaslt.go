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

// Finds the first way to multiply, of those that cuBLAS prefers, that needs
// no workspace and splits no sum.
static int lt_choose(void *handle, int type, int64_t m, int64_t n, int64_t k, lt_algo *algo) {
  lt_product p;
  void *pref = NULL;
  lt_found found[32];
  int count = 0, r = lt_describe(&p, type, m, n, k, (n + 7) / 8 * 8, k, k);
  size_t workspace = 0;
  uint32_t schemes = 0;
  if (r)
    return r;
  if (!(r = lt_pref(&pref)) && !(r = lt_pref_set(pref, PREF_WORKSPACE, &workspace, sizeof workspace)) &&
      !(r = lt_pref_set(pref, PREF_REDUCTION, &schemes, sizeof schemes)))
    r = lt_heuristic(handle, p.desc, p.w, p.a, p.dst, p.dst, pref, 32, found, &count);
  if (pref) lt_pref_free(pref);
  lt_drop(&p);
  if (r)
    return r;
  for (int i = 0; i < count; i++) {
    int32_t splits = 1;
    uint32_t scheme = 0;
    size_t written;
    lt_config(&found[i].algo, CONFIG_SPLITK, &splits, sizeof splits, &written);
    lt_config(&found[i].algo, CONFIG_REDUCTION, &scheme, sizeof scheme, &written);
    if (found[i].state == 0 && found[i].workspace == 0 && splits <= 1 && scheme == 0) {
      *algo = found[i].algo;
      return 0;
    }
  }
  return 15; // CUBLAS_STATUS_NOT_SUPPORTED
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
// the machine has it. The way to multiply is chosen once for a shape of the
// weight, for many rows, and kept for any number of them: so a row does not
// depend on how many there are.
type BLAS struct {
	card   *Card
	handle unsafe.Pointer
	algos  map[blasShape]*C.lt_algo
}

// blasShape is what a way to multiply is chosen for.
type blasShape struct {
	n, k  int
	float bool // float32 results, not bf16
}

// canonicalRows is the number of rows that a way to multiply is chosen for.
const canonicalRows = 2048

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
	b := &BLAS{card: c, algos: map[blasShape]*C.lt_algo{}}
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

// Product starts dst = a·wᵀ, or adds that to dst, on the thread. Values are
// bf16, those of dst float32 where float is set. Rows begin on 16 bytes, and
// there are a multiple of 8 columns.
func (b *BLAS) Product(dst, a, w Operand, add, float bool) error {
	shape := blasShape{w.Rows, w.Cols, float}
	kind := C.int(C.R_16BF)
	if float {
		kind = C.R_32F
	}
	algo := b.algos[shape]
	if algo == nil {
		algo = new(C.lt_algo)
		if code := C.lt_choose(b.handle, kind, canonicalRows, C.int64_t(w.Rows), C.int64_t(w.Cols), algo); code != 0 {
			return fmt.Errorf("choosing how cuBLASLt multiplies by %d x %d: status %d", w.Rows, w.Cols, int(code))
		}
		b.algos[shape] = algo
	}
	if code := C.lt_multiply(b.handle, kind, C.int64_t(a.Rows), C.int64_t(w.Rows), C.int64_t(w.Cols), C.uint64_t(dst.At), C.int64_t(dst.Stride),
		C.uint64_t(a.At), C.int64_t(a.Stride), C.uint64_t(w.At), C.int64_t(w.Stride), C.int(flag(add)), algo, C.uintptr_t(b.card.Stream())); code != 0 {
		return fmt.Errorf("multiplying %d x %d by %d x %d in cuBLASLt: status %d", a.Rows, a.Cols, w.Rows, w.Cols, int(code))
	}
	return nil
}

func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}
