// The reads and writes of a step, as fast as a machine can make them: the C interface that the benchmark
// calls through ctypes.
#pragma once
#include <stdint.h>

#define FUSEDSTEP_LIMIT_API __attribute__((visibility("default")))

#if defined(__cplusplus)
extern "C" {
#endif

// The arrays of a step: weight, gradient and `states` arrays of each tensor. Sizes are the bytes by which a
// stream gets on with each element: even, those of weight and state as large as the gradient's or twice that.
struct fusedstep_limit_streams {
  int32_t states;  // up to 4
  int32_t weight_size, grad_size, state_size;
  int32_t
      two_phase;  // 0: elementwise, one pass; 1: norms in a first pass, the update of the weight in a second
};

// The place of the arrays in memory.
struct fusedstep_limit_memory {
  int32_t huge_pages;
  int32_t offset;  // bytes by which the start of each stream in its page is apart from the one before; of 64
};

// Ways of a two-phase step to bring the update from one pass to the next.
enum fusedstep_limit_way {
  FUSEDSTEP_LIMIT_STORE,      // keeps it in the gradient's memory
  FUSEDSTEP_LIMIT_RECOMPUTE,  // computes it again from states that the first pass has written
  FUSEDSTEP_LIMIT_TWICE       // computes all again: the first pass only reads
};

// The order and the threads in which the arrays are gone over.
struct fusedstep_limit_walk {
  int32_t threads;
  int32_t prefetch;       // elements ahead; 0: none
  int32_t take;           // true if a thread that is done steals from the others
  int32_t alternate;      // every other walk goes from the end to the beginning
  int32_t way;            // two-phase: enum fusedstep_limit_way
  int32_t backward;       // two-phase: each thread takes its part of a wave the other way in the second pass
  int64_t wave_elements;  // two-phase: whole tensors that go through both passes together; 0: all
};

struct fusedstep_limit;

// `elements[i]` is the size of tensor i. Memory is first touched by the thread, of `threads`, that a walk on
// as many goes over it with while shares are equal. Null if there is not enough memory.
FUSEDSTEP_LIMIT_API struct fusedstep_limit* fusedstep_limit_new(const struct fusedstep_limit_streams* streams,
                                                                const struct fusedstep_limit_memory* memory,
                                                                int64_t tensors, const int64_t* elements,
                                                                int32_t threads);
FUSEDSTEP_LIMIT_API void fusedstep_limit_delete(struct fusedstep_limit* limit);

// Walks `repetitions` times; seconds[i] is the duration of one.
FUSEDSTEP_LIMIT_API void fusedstep_limit_run(struct fusedstep_limit* limit,
                                             const struct fusedstep_limit_walk* walk, int64_t repetitions,
                                             double* seconds);

// Bytes read plus bytes written by one walk in a way.
FUSEDSTEP_LIMIT_API int64_t fusedstep_limit_traffic(const struct fusedstep_limit* limit, int32_t way);

// The memory of one stream: the tensors one after the other, each at a multiple of 64 bytes.
FUSEDSTEP_LIMIT_API void* fusedstep_limit_data(const struct fusedstep_limit* limit, int32_t stream);

// The exclusive or, in words of two bytes, of all that passes without writes have read.
FUSEDSTEP_LIMIT_API uint16_t fusedstep_limit_sum(const struct fusedstep_limit* limit);

// The instruction set of the loops: "avx512", "avx2" or "base".
FUSEDSTEP_LIMIT_API const char* fusedstep_limit_isa(void);

#if defined(__cplusplus)
}
#endif
