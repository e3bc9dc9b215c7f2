// Kernels over gradients, the same for every rule: sums of squares; a look at the indices of sparse ones.
#include "cuda_kernels/reduce.cuh"
#include "cuda_kernels/rows.cuh"

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
  __device__ __forceinline__ Read<N> load(Width<N>, const Offsets<kOperands>& at) const {
    Read<N> read;
    cuda::load<kAgain>(grad + at.offset[kGrad], read.grad);
    return read;
  }
  template <int N, class Add>
  __device__ __forceinline__ void finish(Width<N>, const Offsets<kOperands>&, const Read<N>& read,
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

// The same for a tensor whose layout has the order of rows and columns.
template <class Stored>
struct SquareInOrder : Square<Stored> {
  const BlockLayout& layout;

  template <int N>
  __device__ __forceinline__ auto load(Width<N>, const Offsets<kFirstState>& at) const {
    typename Square<Stored>::template Read<N> read;
    for_in_order(layout, kGrad, at.offset[kGrad], N,
                 [&](int j, int64_t offset) { read.grad[j] = Codec<Stored>::decode(this->grad[offset]); });
    return read;
  }
};

// Sums over a sparse gradient, each row once: thread by thread, then in a tree. The host does not know the
// number of rows; so chunks are not the CPU's, and sums cannot have its order.
template <Access kAccess, class Stored>
__device__ __forceinline__ void sum_rows(const Launch& launch, const NumberedChunk& numbered,
                                         const Grad& grad) {
  constexpr int kWidth = kWordBytes / sizeof(Stored);
  __shared__ double sums[kThreads];
  double sum = 0;
  for_rows<kAccess, kWidth, kFirstState>(
      launch.tensors[numbered.chunk.tensor].layout, *grad.rows, numbered.chunk, threadIdx.x, kThreads,
      [&](auto width, const auto& place) {
        ComputeOf<Stored> x[decltype(width)::value];
        load_sum<kAgain>(*grad.rows, static_cast<const Stored*>(grad.data), place, x);
#pragma unroll
        for (int j = 0; j < width; ++j) sum += static_cast<double>(x[j]) * static_cast<double>(x[j]);
      });
  sums[threadIdx.x] = sum;
  for (unsigned left = kThreads / 2; left > 0; left /= 2) {
    __syncthreads();
    if (threadIdx.x < left) sums[threadIdx.x] += sums[threadIdx.x + left];
  }
  if (threadIdx.x == 0) launch.partials[kPartials * numbered.number] = sums[0];
}

template <Access kAccess, class Stored>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Launch launch) {
  const NumberedChunk numbered = launch.chunks[blockIdx.x];
  const Grad& grad = launch.grads[numbered.chunk.tensor];
  const auto* data = static_cast<const Stored*>(grad.data);
  const TensorTask& task = launch.tensors[numbered.chunk.tensor];
  if (grad.rows != nullptr) {
    sum_rows<kAccess, Stored>(launch, numbered, grad);
  } else if (kAccess == kByElement && task.in_order) {
    const SquareInOrder<Stored> body{{data}, task.layout};
    sum_chunk<kInWords, double, 1, ComputeOf<Stored>>(launch, numbered, body);
  } else {
    sum_chunk<kAccess, double, 1, ComputeOf<Stored>>(launch, numbered, Square<Stored>{data});
  }
}

template <class Stored>
void launch_sum(Access access, const Launch& launch) {
  const auto kernel = access == kInWords ? sum_kernel<kInWords, Stored> : sum_kernel<kByElement, Stored>;
  launch_blocks(kernel, launch.chunk_count, launch.queue, launch);
}

__global__ void __launch_bounds__(kThreads) add_kernel(const double* partials, int64_t count, double* sum) {
  const Sums<1> total = sum_partials<1, BlockTeam>(partials, count);
  if (threadIdx.x == 0) *sum += total.of[0];
}

// Blocks that share a tensor's indices.
constexpr int kIndexBlocks = 16;

__global__ void __launch_bounds__(kThreads) index_kernel(const __grid_constant__ IndexLaunch launch) {
  const int64_t tensor = blockIdx.x / kIndexBlocks;
  const GradRows* const rows = launch.grads[tensor].rows;
  if (rows == nullptr) return;
  const RowIndex& index = rows->index;
  for (int64_t i = blockIdx.x % kIndexBlocks * kThreads + threadIdx.x; i < index.dims * index.entries;
       i += kIndexBlocks * kThreads) {
    const int dim = static_cast<int>(i / index.entries);
    const int64_t row = index.at(dim, i % index.entries);
    if (row < 0 || row >= rows->sizes[dim]) {
      atomicMin(&launch.found[tensor], static_cast<unsigned long long>(i));
    }
  }
}

}  // namespace

void check_indices(const IndexLaunch& launch) {
  launch_blocks(index_kernel, launch.tensor_count * kIndexBlocks, Queue{launch.stream}, launch);
}

void sum_grad_chunks(Format format, Access access, const Launch& launch) {
  switch (format) {
#define FUSEDSTEP_CASE(name, Weight, State) \
  case Format::k##name:                     \
    return launch_sum<StoredOf<Weight>::Type>(access, launch);
    FUSEDSTEP_FORMATS(FUSEDSTEP_CASE)
#undef FUSEDSTEP_CASE
    case Format::kCount:
      return;
  }
}

void add_chunks(const double* partials, int64_t count, double* sum, Stream stream) {
  launch_blocks(add_kernel, 1, Queue{stream}, partials, count, sum);
}

}  // namespace fusedstep::cuda
