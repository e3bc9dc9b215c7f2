// The versions of CUDA that Python compares when it has loaded this library
// (python/fusedstep/_native/ops.py).
#include <cuda_runtime_api.h>

// Both as 13000 for 13.0. A driver that is not there is 0.
extern "C" __attribute__((visibility("default"))) void fusedstep_cuda_versions(int* runtime, int* driver) {
  *runtime = CUDART_VERSION;
  if (cudaDriverGetVersion(driver) != cudaSuccess) *driver = 0;
}
