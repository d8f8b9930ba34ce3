//go:build cuda && cgo

/*
 * Every driver call by a jump through a table that draftscope_load fills from
 * libcuda.so.1 at run time. So the program links without CUDA, and starts on
 * machines without a driver: there, every call answers
 * CUDA_ERROR_NOT_INITIALIZED.
 *
 * The jump leaves registers and stack as the caller made them, so one kind of
 * trampoline serves calls of any signature.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>

static int absent(void) { return 3; /* CUDA_ERROR_NOT_INITIALIZED */ }

#if defined(__x86_64__)
#define JUMP(name) "jmp *draftscope_to_" #name "(%rip)\n"
#elif defined(__aarch64__)
#define JUMP(name)                                                             \
  "adrp x16, draftscope_to_" #name "\n"                                        \
  "ldr x16, [x16, :lo12:draftscope_to_" #name "]\n"                            \
  "br x16\n"
#else
#error "the tag cuda needs amd64 or arm64"
#endif

#define CALL(name)                                                             \
  __attribute__((visibility("hidden"))) void *draftscope_to_##name = absent;   \
  __asm__(".text\n.balign 16\n.globl " #name "\n.type " #name                  \
          ", %function\n" #name ":\n" JUMP(name) ".size " #name ", .-" #name   \
          "\n.previous\n");
#include "calls.h"
#undef CALL

struct call {
  const char *name;
  void **to;
};

static const struct call calls[] = {
#define CALL(name) {#name, &draftscope_to_##name},
#include "calls.h"
#undef CALL
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char reason[512]; /* why the library did not load */
static int status = 3;   /* what the real cuInit said */

static void load(void) {
  void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (lib == NULL) {
    snprintf(reason, sizeof reason, "%s", dlerror());
    return;
  }
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    void *to = dlsym(lib, calls[i].name);
    if (to != NULL)
      *calls[i].to = to; /* an older driver may lack some */
  }
  int (*init)(unsigned int) = (int (*)(unsigned int))dlsym(lib, "cuInit");
  if (init == NULL) {
    snprintf(reason, sizeof reason, "libcuda.so.1 has no cuInit");
    return;
  }
  status = init(0);
}

/* Loads and starts the driver once; later calls repeat the answer. Returns
 * what cuInit said; *why is not empty where there is no library. */
int draftscope_load(const char **why) {
  pthread_once(&once, load);
  *why = reason;
  return status;
}

/* gorgonia.org/cu calls this as the program starts, and would end the program
 * on an error: the driver is started by draftscope_load instead, when a device
 * is asked for. */
int cuInit(unsigned int flags) {
  (void)flags;
  return 0;
}
