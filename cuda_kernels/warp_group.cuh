// Instructions of a warp group, and of a cluster of blocks: Hopper's (sm_90a) alone.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fusedstep::cuda {

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes to shared memory without waiting, or zeros if they are not there.
__device__ __forceinline__ void copy_word(void* to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)),
               "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until no more than `kLeft` groups of copies are under way, and shows products what has arrived.
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;\nfence.proxy.async.shared::cta;\n" ::"n"(kLeft) : "memory");
}

// Names a matrix in shared memory to products: rows of 128 bytes, of which each group of 8 begins at a
// multiple of 1024 bytes. A row's 16-byte words are permuted: word w of row n is at w ^ (n % 8).
__device__ __forceinline__ uint64_t describe_matrix(const void* p) {
  constexpr uint64_t kSwizzled128 = uint64_t{1} << 62, kGroup = uint64_t{1024 / 16} << 32, kUnused = 1 << 16;
  return (shared_address(p) & 0x3ffffu) >> 4 | kUnused | kGroup | kSwizzled128;
}

// The same for boxes of 64 x 64 numbers of 16 bits, one behind another. `kByColumns`: rows of a box are
// depths, and boxes follow each other along the matrix's rows or columns.
template <bool kByColumns>
__device__ __forceinline__ uint64_t describe_boxes(const void* p) {
  constexpr uint64_t kNextBox = uint64_t{8192 / 16} << 16, kUnused = uint64_t{1} << 16;
  return (describe_matrix(p) & ~kUnused) | (kByColumns ? kNextBox : kUnused);
}

// Keeps the compiler from moving the use of what products read or write over their beginning and end.
template <int N>
__device__ __forceinline__ void hold(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
// Waits until no more than `kLeft` groups of products are under way.
template <int kLeft>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kLeft) : "memory");
}

// Has a thread of a warp group give registers back, or take some.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Waits for all threads of a cluster, and for what they have written.
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n" ::: "memory");
}
// A word at the same place in the shared memory of another block of the cluster.
__device__ __forceinline__ float4 load_from_block(const float4* p, int block) {
  unsigned there = 0;
  float4 x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(shared_address(p)), "r"(block));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];\n"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(there)
               : "memory");
  return x;
}

// d += a * b, or d = a * b if `adds` is 0, in TF32: 64 rows, 8 deep. Each warp has 16 rows of a and d in
// registers, in the order of mma.m16n8k8.
template <int kColumns>
struct Multiply;

// clang-format off
#define FUSEDSTEP_SUMS(i)                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),     \
      "+f"(d[i + 6]), "+f"(d[i + 7])

template <>
struct Multiply<32> {
  static __device__ __forceinline__ void run(float (&d)[16], const unsigned (&a)[4], uint64_t b, int adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 {"
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, p, 1, 1;\n}\n"
        : FUSEDSTEP_SUMS(0), FUSEDSTEP_SUMS(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
  }
};

template <>
struct Multiply<64> {
  static __device__ __forceinline__ void run(float (&d)[32], const unsigned (&a)[4], uint64_t b, int adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {"
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1;\n}\n"
        : FUSEDSTEP_SUMS(0), FUSEDSTEP_SUMS(8), FUSEDSTEP_SUMS(16), FUSEDSTEP_SUMS(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
  }
};

template <>
struct Multiply<128> {
  static __device__ __forceinline__ void run(float (&d)[64], const unsigned (&a)[4], uint64_t b, int adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {"
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
          "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1;\n}\n"
        : FUSEDSTEP_SUMS(0), FUSEDSTEP_SUMS(8), FUSEDSTEP_SUMS(16), FUSEDSTEP_SUMS(24),
          FUSEDSTEP_SUMS(32), FUSEDSTEP_SUMS(40), FUSEDSTEP_SUMS(48), FUSEDSTEP_SUMS(56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
  }
};

// The same for numbers of 16 bits, 256 columns and 16 deep, with both operands in shared memory.
template <class T>
struct Multiply16;
#define FUSEDSTEP_MULTIPLY_16(Number, name)                                                                     \
  template <>                                                                                                   \
  struct Multiply16<Number> {                                                                                   \
    template <bool kAByColumns, bool kBByColumns>                                                               \
    static __device__ __forceinline__ void run(float (&d)[128], uint64_t a, uint64_t b, int adds) {             \
      asm volatile(                                                                                             \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                                         \
          "wgmma.mma_async.sync.aligned.m64n256k16.f32." name "." name " {"                                     \
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                            \
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                  \
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                  \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                  \
            "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                  \
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                  \
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "      \
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
          "%128, %129, p, 1, 1, %131, %132;\n}\n"                                                               \
          : FUSEDSTEP_SUMS(0), FUSEDSTEP_SUMS(8), FUSEDSTEP_SUMS(16), FUSEDSTEP_SUMS(24),                       \
            FUSEDSTEP_SUMS(32), FUSEDSTEP_SUMS(40), FUSEDSTEP_SUMS(48), FUSEDSTEP_SUMS(56),                     \
            FUSEDSTEP_SUMS(64), FUSEDSTEP_SUMS(72), FUSEDSTEP_SUMS(80), FUSEDSTEP_SUMS(88),                     \
            FUSEDSTEP_SUMS(96), FUSEDSTEP_SUMS(104), FUSEDSTEP_SUMS(112), FUSEDSTEP_SUMS(120)                   \
          : "l"(a), "l"(b), "r"(adds), "n"(kAByColumns ? 1 : 0), "n"(kBByColumns ? 1 : 0));                     \
    }                                                                                                           \
  };
FUSEDSTEP_MULTIPLY_16(__nv_bfloat16, "bf16")
FUSEDSTEP_MULTIPLY_16(__half, "f16")
#undef FUSEDSTEP_MULTIPLY_16
#undef FUSEDSTEP_SUMS
// clang-format on

}  // namespace fusedstep::cuda
