// The bulk copies of boxes of matrices, and the barriers that count them: Hopper's (sm_90a).
#pragma once
#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "cuda_kernels/warp_group.cuh"

namespace fusedstep::cuda {

// A barrier in shared memory, for so many arrivals.
__device__ __forceinline__ void begin_barrier(uint64_t& barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(&barrier)), "r"(arrivals));
}
// Shows barriers that have begun to all threads, and to copies.
__device__ __forceinline__ void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;\n" ::: "memory");
}
// Arrives, and says how many bytes copies will bring.
__device__ __forceinline__ void expect_bytes(uint64_t& barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(&barrier)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait_for(uint64_t& barrier, unsigned phase) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;\n}\n" ::"r"(shared_address(&barrier)),
      "r"(phase)
      : "memory");
}
// One arrival for a warp group, by its first thread.
__device__ __forceinline__ void arrive_once(uint64_t& barrier) {
  if (threadIdx.x % 128 == 0) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(&barrier)) : "memory");
  }
}

// Copies a box to shared memory; zeros for what lies outside of the matrix.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& from, int column, int row, int matrix,
                                         uint64_t& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];\n" ::"r"(shared_address(to)),
      "l"(&from), "r"(column), "r"(row), "r"(matrix), "r"(shared_address(&barrier))
      : "memory");
}
// Copies a box from shared memory; nothing outside of the matrix is written.
__device__ __forceinline__ void store_box(const CUtensorMap& to, int column, int row, int matrix,
                                          const void* from) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n" ::"l"(&to),
               "r"(column), "r"(row), "r"(matrix), "r"(shared_address(from))
               : "memory");
}
__device__ __forceinline__ void end_stores() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
// Waits until no more than `kLeft` groups of stores of this thread still read shared memory.
template <int kLeft>
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kLeft) : "memory");
}
// Makes this thread's writes to shared memory visible to bulk copies.
__device__ __forceinline__ void show_to_copies() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
// Waits for the threads of a warp group, each of which has a barrier of its own.
__device__ __forceinline__ void wait_for_group(int group) {
  asm volatile("bar.sync %0, 128;\n" ::"r"(group + 1) : "memory");
}
// Stores four 8 x 8 matrices of 16-bit numbers transposed: a warp has them as the sums of products.
__device__ __forceinline__ void store_transposed(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                   shared_address(row)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace fusedstep::cuda
