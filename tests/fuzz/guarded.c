/* An allocator for torch's tensors on the CPU whose blocks lie between pages that nobody may touch.
 *
 * cc -shared -fPIC -O1 -o guarded.so guarded.c -ldl; LD_PRELOAD=./guarded.so; guarded_begin() turns it on.
 * Torch takes tensors' memory from posix_memalign. A block ends where its page does (three of four) or begins where
 * its page does: who reads or writes beside it gets SIGSEGV, not a neighbour. What is freed is never used again.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#define SPAN (1ull << 42)
#define PAGE 4096ull
#define MOST (1ull << 31)

static char *base, *next_free;
static uint64_t live, draws;
static int on;
static void (*real_free)(void *);
static int (*real_memalign)(void **, size_t, size_t);

static void find(void) {
  if (!real_free) real_free = dlsym(RTLD_NEXT, "free");
  if (!real_memalign) real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
}

void guarded_begin(void) {
  find();
  base = mmap(0, SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) abort();
  next_free = base;
  on = 1;
}

int posix_memalign(void **out, size_t alignment, size_t size) {
  find();
  if (!on) return real_memalign(out, alignment, size);
  uint64_t body = ((size ? size : 1) + PAGE - 1) / PAGE * PAGE;
  if (live + body > MOST) return ENOMEM;
  char *block = __sync_fetch_and_add(&next_free, body + 3 * PAGE) + 2 * PAGE;
  if (block + body > base + SPAN - PAGE) return ENOMEM;
  if (mprotect(block - PAGE, PAGE, PROT_READ | PROT_WRITE)) return ENOMEM;
  ((uint64_t *)(block - PAGE))[0] = body;
  if (mprotect(block - PAGE, PAGE, PROT_NONE)) return ENOMEM;
  if (mprotect(block, body, PROT_READ | PROT_WRITE)) return ENOMEM;
  __sync_fetch_and_add(&live, body);
  uint64_t draw = __sync_fetch_and_add(&draws, 1);
  *out = draw % 4 == 3 ? block : block + (body - ((size ? size : 1) + 15) / 16 * 16);
  return 0;
}

void free(void *pointer) {
  find();
  char *at = pointer;
  if (!on || at < base || at >= base + SPAN) {
    if (real_free) real_free(pointer);
    return;
  }
  char *block = (char *)((uintptr_t)at / PAGE * PAGE);
  /* A block that ends with its page may begin on any page of it: look for the page that knows the length. */
  for (char *page = block - PAGE;; page -= PAGE) {
    if (mprotect(page, PAGE, PROT_READ)) abort();
    uint64_t body = ((uint64_t *)page)[0];
    if (body && page + PAGE + body > block) {
      mprotect(page, PAGE, PROT_NONE);
      madvise(page + PAGE, body, MADV_DONTNEED);
      mprotect(page + PAGE, body, PROT_NONE);
      __sync_fetch_and_sub(&live, body);
      return;
    }
    abort();
  }
}
