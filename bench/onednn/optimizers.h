// Optimizer steps made of oneDNN's primitives: the C interface that the benchmark calls through ctypes.
#pragma once
#include <stdint.h>

#define FUSEDSTEP_ONEDNN_API __attribute__((visibility("default")))

#if defined(__cplusplus)
extern "C" {
#endif

struct fusedstep_onednn_hyper {
  double beta1, beta2, eps;  // Adagrad has no betas
};

struct fusedstep_onednn;

// `optimizer` is "adagrad", "adam" or "lamb", without decay. `operands` holds weight, gradient and states of
// the first tensor, then of the next: contiguous floats, borrowed. Null if oneDNN refuses.
FUSEDSTEP_ONEDNN_API struct fusedstep_onednn* fusedstep_onednn_new(const char* optimizer,
                                                                   const struct fusedstep_onednn_hyper* hyper,
                                                                   int64_t tensors, const int64_t* elements,
                                                                   float* const* operands);
FUSEDSTEP_ONEDNN_API void fusedstep_onednn_delete(struct fusedstep_onednn* optimizer);

// One step of all tensors. Returns 0, or oneDNN's status.
FUSEDSTEP_ONEDNN_API int32_t fusedstep_onednn_step(struct fusedstep_onednn* optimizer, double lr);

// Why the last call in this thread failed.
FUSEDSTEP_ONEDNN_API const char* fusedstep_onednn_error(void);

#if defined(__cplusplus)
}
#endif
