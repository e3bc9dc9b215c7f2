// Sums of squares of gradients, whatever the rule.
#include "cuda_kernels/reduce.cuh"

namespace fusedstep::cuda {
namespace {

template <class Stored>
struct Square {
  static constexpr int kOperands = kFirstState;
  static constexpr bool scales = false, stores = false;
  using T = ComputeOf<Stored>;
  template <int N>
  struct Read {
    T grad[N];
  };

  const Stored* grad;

  template <int N>
  __device__ __forceinline__ Read<N> load(Width<N>, const Place<kOperands>& at) const {
    Read<N> read;
    cuda::load<kAgain>(grad + at.offset[kGrad], read.grad);
    return read;
  }
  template <int N, class Add>
  __device__ __forceinline__ void finish(Width<N>, const Place<kOperands>&, const Read<N>& read,
                                         const Add& add) const {
#pragma unroll
    for (int j = 0; j < N; ++j) add(0, j, read.grad[j]);
  }

  static __device__ int element_size(int) { return sizeof(Stored); }
  __device__ __forceinline__ void start_at(void* const* data) {
    grad = static_cast<const Stored*>(data[kGrad]);
  }
  template <class Place>
  __device__ __forceinline__ void load_rest(const Place&, Read<1>&) const {}
  template <class Place>
  __device__ __forceinline__ void load_grad(const Place& at, Read<1>& read) const {
    cuda::load<kAgain>(grad + at.offset[kGrad], read.grad);
  }
  template <class Place>
  __device__ __forceinline__ void scale_grad(const Place&, const T (&)[1]) const {}
  template <class Place>
  __device__ __forceinline__ void store_grad(const Place&, const Read<1>&) const {}
  template <class Place, class Add>
  __device__ __forceinline__ void work(const Place&, const Read<1>& read, const Add& add) const {
    add(0, 0, read.grad[0]);
  }
};

template <Access kAccess, class Stored>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Launch launch) {
  const NumberedChunk numbered = launch.chunks[blockIdx.x];
  const auto* grad = static_cast<const Stored*>(launch.grads[numbered.chunk.tensor].data);
  sum_chunk<kAccess, 1, ComputeOf<Stored>>(launch, numbered, Square<Stored>{grad});
}

template <class Stored>
void launch_sum(Access access, const Launch& launch) {
  const auto kernel = access == kInWords ? sum_kernel<kInWords, Stored> : sum_kernel<kByElement, Stored>;
  launch_blocks(kernel, launch.chunk_count, launch.stream, launch);
}

__global__ void __launch_bounds__(kThreads) add_kernel(const double* partials, int64_t count, double* sum) {
  const Sums<1> total = sum_partials<1, BlockTeam>(partials, count);
  if (threadIdx.x == 0) *sum += total.of[0];
}

}  // namespace

void sum_grad_chunks(Format format, Access access, const Launch& launch) {
  switch (format) {
#define FUSEDSTEP_CASE(name, Weight, State) \
  case Format::k##name:                     \
    return launch_sum<Weight>(access, launch);
    FUSEDSTEP_FORMATS(FUSEDSTEP_CASE)
#undef FUSEDSTEP_CASE
    case Format::kCount:
      return;
  }
}

void add_chunks(const double* partials, int64_t count, double* sum, Stream stream) {
  launch_blocks(add_kernel, 1, stream, partials, count, sum);
}

}  // namespace fusedstep::cuda
