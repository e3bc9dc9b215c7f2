// How fast a machine can make a step's reads and writes: the C interface that the benchmark calls through
// ctypes.
#pragma once
#include <stdint.h>

#define FUSEDSTEP_LIMIT_API __attribute__((visibility("default")))

#if defined(__cplusplus)
extern "C" {
#endif

// What a step goes over: weight, gradient and `states` arrays of each tensor.
struct fusedstep_limit_streams {
  int32_t states;        // up to 4
  int32_t element_size;  // bytes, even
  int32_t
      two_phase;  // 0: elementwise, one pass; 1: moments and norms in a first pass, the update in a second
};

// Where the arrays lie.
struct fusedstep_limit_memory {
  int32_t huge_pages;
  int32_t offset;  // bytes by which the start of each stream in its page is apart from the one before; of 64
};

// How they are gone over.
struct fusedstep_limit_walk {
  int32_t threads;
  int32_t prefetch;       // elements ahead; 0: none
  int64_t wave_elements;  // two-phase: whole tensors that go through both passes together; 0: all
  int32_t store;          // two-phase: keep the update in the gradient's memory, or compute it again
  int32_t backward;       // two-phase: each thread takes its part of a wave backwards in the second pass
};

struct fusedstep_limit;

// `elements[i]` is the size of tensor i. Memory is first touched by the thread, of `threads`, that a walk on
// as many goes over it with. Null if there is not enough memory.
FUSEDSTEP_LIMIT_API struct fusedstep_limit* fusedstep_limit_new(const struct fusedstep_limit_streams* streams,
                                                                const struct fusedstep_limit_memory* memory,
                                                                int64_t tensors, const int64_t* elements,
                                                                int32_t threads);
FUSEDSTEP_LIMIT_API void fusedstep_limit_delete(struct fusedstep_limit* limit);

// Walks `repetitions` times; seconds[i] is the duration of one.
FUSEDSTEP_LIMIT_API void fusedstep_limit_run(struct fusedstep_limit* limit,
                                             const struct fusedstep_limit_walk* walk, int64_t repetitions,
                                             double* seconds);

// Bytes read plus bytes written by one walk that keeps the update, or does not.
FUSEDSTEP_LIMIT_API int64_t fusedstep_limit_traffic(const struct fusedstep_limit* limit, int32_t store);

// The memory of one stream: the tensors one after the other, each at a multiple of 64 bytes.
FUSEDSTEP_LIMIT_API void* fusedstep_limit_data(const struct fusedstep_limit* limit, int32_t stream);

// The instruction set of the loops: "avx512", "avx2" or "base".
FUSEDSTEP_LIMIT_API const char* fusedstep_limit_isa(void);

#if defined(__cplusplus)
}
#endif
