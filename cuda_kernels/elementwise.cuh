// A rule's operands in a kernel, and the pass of an elementwise rule: one block of threads a part of a chunk.
#pragma once
#include "cuda_kernels/codecs.cuh"
#include "cuda_kernels/pack.cuh"
#include "cuda_kernels/walk.cuh"
#include "src/core/phases.h"

namespace fusedstep::cuda {

__device__ __forceinline__ bool left_out(const float* found_inf) {
  return found_inf != nullptr && *found_inf != 0;
}

template <int kStates, class T, int N>
struct Elements {
  T weight[N], grad[N];
  rules::States<T[N], kStates> state;
};

// Arguments of a block of threads: a tensor's operands under their types, the rule's scalars, and the
// treatment of the gradient.
template <class Rule_, class Weight, class State>
struct Operands {
  using Rule = Rule_;
  using Stored = typename StoredOf<Weight>::Type;
  using T = ComputeOf<Stored>;
  // The last state may be the weight's master copy.
  static constexpr bool kHasMaster = StoredOf<Weight>::kHasMaster;
  static constexpr int kStates = Rule::kStates + kHasMaster, kOperands = kFirstState + kStates;
  // Elements of one access of the weight.
  static constexpr int kWidth = kWordBytes / sizeof(Stored);
  using At = Offsets<kOperands>;
  template <int N>
  using Read = Elements<kStates, T, N>;

  Stored *weight, *grad;
  rules::States<State*, kStates> state;
  typename Rule::template Scalars<T> scalars;
  T factor, scale;      // multiply the gradient as it is read; in memory, before that
  bool scales, clears;  // true if `scale` multiplies it; if it is zero in the end

  // Without the scalars if the caller takes them later.
  __device__ Operands(const Launch& launch, const Chunk& chunk, bool with_scalars = true) {
    const TensorTask& task = launch.tensors[chunk.tensor];
    const Grad& gradient = launch.grads[chunk.tensor];
    weight = static_cast<Stored*>(task.data[kWeight]);
    grad = static_cast<Stored*>(gradient.data);
#pragma unroll
    for (int k = 0; k < kStates; ++k) state[k] = static_cast<State*>(task.data[kFirstState + k]);
    const double whole = launch.grad_factor * (launch.more_factor != nullptr ? *launch.more_factor : 1.0);
    scales = gradient.own && launch.use == GradUse::kScale;
    clears = gradient.own && launch.use == GradUse::kClear;
    scale = static_cast<T>(whole);
    factor = static_cast<T>(launch.sign * (scales ? 1.0 : whole));
    if (with_scalars) take_scalars(launch, chunk);
  }

  // The kernel before this one may have prepared them: best when elements have been asked for.
  __device__ __forceinline__ void take_scalars(const Launch& launch, const Chunk& chunk) {
    wait_for_kernel_before();
    // Number by number: as bytes they would be read one by one.
    using Numbers = decltype(scalars);
    scalars = launch.scalars_of_tensor != nullptr
                  ? *reinterpret_cast<const Numbers*>(launch.scalars_of_tensor[chunk.tensor].bytes)
                  : *reinterpret_cast<const Numbers*>(launch.scalars.bytes);
  }

  static __device__ int element_size(int operand) {
    return operand < kFirstState ? sizeof(Stored) : sizeof(State);
  }
  // Makes offsets those from other elements.
  __device__ __forceinline__ void start_at(void* const* data) {
    weight = static_cast<Stored*>(data[kWeight]);
    grad = static_cast<Stored*>(data[kGrad]);
#pragma unroll
    for (int k = 0; k < kStates; ++k) state[k] = static_cast<State*>(data[kFirstState + k]);
  }

  template <Reuse kReuse, int N, Reuse kOfWeight = kReuse>
  __device__ __forceinline__ Read<N> load_all(const At& at) const {
    Read<N> read;
    load<kOfWeight>(weight + at.offset[kWeight], read.weight);
    load<kReuse>(grad + at.offset[kGrad], read.grad);
    load_states<kReuse>(at, read);
    return read;
  }
  // All of the weight, where no other state is needed.
  template <Reuse kReuse, class Place, int N>
  __device__ __forceinline__ void load_weight(const Place& at, Elements<kStates, T, N>& read) const {
    load<kReuse>(weight + at.offset[kWeight], read.weight);
    if constexpr (kHasMaster) {
      load<kReuse>(state[Rule::kStates] + at.offset[kFirstState + Rule::kStates], read.state[Rule::kStates]);
    }
  }
  template <Reuse kReuse, class Place, int N>
  __device__ __forceinline__ void store_weight(const Place& at, const Elements<kStates, T, N>& read) const {
    store<kReuse>(weight + at.offset[kWeight], read.weight);
    if constexpr (kHasMaster) {
      store<kReuse>(state[Rule::kStates] + at.offset[kFirstState + Rule::kStates], read.state[Rule::kStates]);
    }
  }
  template <Reuse kReuse, class Place, int N>
  __device__ __forceinline__ void load_states(const Place& at, Elements<kStates, T, N>& read) const {
#pragma unroll
    for (int k = 0; k < kStates; ++k) load<kReuse>(state[k] + at.offset[kFirstState + k], read.state[k]);
  }
  // Stores the rule's states, not the master copy.
  template <Reuse kReuse, class Place, int N>
  __device__ __forceinline__ void store_states(const Place& at, const Elements<kStates, T, N>& read) const {
#pragma unroll
    for (int k = 0; k < Rule::kStates; ++k)
      store<kReuse>(state[k] + at.offset[kFirstState + k], read.state[k]);
  }
  // The gradient in memory times the scale, as memory holds it.
  template <class Place, int N>
  __device__ __forceinline__ void scale_grad(const Place& at, T (&x)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = Codec<Stored>::decode(Codec<Stored>::encode(x[j] * scale));
    store<kOnce>(grad + at.offset[kGrad], x);
  }
  template <int N, class Place>
  __device__ __forceinline__ void clear_grad(const Place& at) const {
    const T zeros[N] = {};
    store<kOnce>(grad + at.offset[kGrad], zeros);
  }
  // N elements of the weight from `first` on: where a master copy rounds to them, that.
  template <int N, int kRead>
  __device__ __forceinline__ Pack<T, N> weight_of(const Elements<kStates, T, kRead>& read, int first) const {
    Pack<T, N> p(read.weight + first);
    if constexpr (kHasMaster) {
      const T* const masters = read.state[Rule::kStates] + first;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const T rounded = Codec<Stored>::decode(Codec<Stored>::encode(masters[j]));
        p.of[j] = rules::where_equal(rounded, p.of[j], masters[j], p.of[j]);
      }
    }
    return p;
  }
  template <int N, int kRead>
  __device__ __forceinline__ void put_weight(const Pack<T, N>& p, Elements<kStates, T, kRead>& read,
                                             int first) const {
    p.copy_to(read.weight + first);
    if constexpr (kHasMaster) p.copy_to(read.state[Rule::kStates] + first);
  }
  // Calls run(first, p, g, states) with the elements from `first` on, by reference but for the gradient: as
  // many at a time as registers allow.
  template <int N, class Run>
  __device__ __forceinline__ void with_packs(Elements<kStates, T, N>& read, Run run) const {
    constexpr int kTogether = N < 4 ? N : 4;
    using V = Pack<T, kTogether>;
#pragma unroll
    for (int first = 0; first < N; first += kTogether) {
      V p = weight_of<kTogether>(read, first);
      rules::States<V, Rule::kStates> s;
#pragma unroll
      for (int k = 0; k < Rule::kStates; ++k) s[k] = V(read.state[k] + first);
      run(first, p, V(read.grad + first) * V(factor), s);
      put_weight(p, read, first);
#pragma unroll
      for (int k = 0; k < Rule::kStates; ++k) s[k].copy_to(read.state[k] + first);
    }
  }
};

// Last pass of a step that is skipped: clears gradients, and does nothing else.
template <class Body>
struct Clear : Body {
  struct Nothing {};
  using Body::Body;
  template <int N>
  __device__ Nothing load(Width<N>, const typename Body::At&) const {
    return {};
  }
  template <int N>
  __device__ void finish(Width<N>, const typename Body::At& at, const Nothing&) const {
    this->template clear_grad<N>(at);
  }
};

template <class Operands>
struct Update : Operands {
  using Operands::Operands;
  using At = typename Operands::At;
  using T = typename Operands::T;
  static constexpr int kReads = Operands::kOperands;
  template <int N>
  using Read = typename Operands::template Read<N>;

  template <int N>
  __device__ __forceinline__ Read<N> load(Width<N>, const At& at) const {
    return this->template load_all<kOnce, N>(at);
  }
  template <int N>
  __device__ __forceinline__ void finish(Width<N>, const At& at, Read<N> read) const {
    if (this->scales) this->scale_grad(at, read.grad);
    work(at, read);
    if (this->clears) this->template clear_grad<N>(at);
  }

  template <class Place>
  __device__ __forceinline__ void load_rest(const Place& at, Read<1>& read) const {
    cuda::load<kOnce>(this->weight + at.offset[kWeight], read.weight);
    this->template load_states<kOnce>(at, read);
  }
  template <class Place>
  __device__ __forceinline__ void load_grad(const Place& at, Read<1>& read) const {
    cuda::load<kOnce>(this->grad + at.offset[kGrad], read.grad);
  }
  template <class Place, int N>
  __device__ __forceinline__ void work(const Place& at, Elements<Operands::kStates, T, N>& read) const {
    this->with_packs(read, [&](int, auto& p, auto g, auto& s) {
      update<typename Operands::Rule>(this->scalars, p, g, s);
    });
    this->template store_weight<kOnce>(at, read);
    this->template store_states<kOnce>(at, read);
  }
};

// Blocks of threads that a multiprocessor is to hold, by the registers that the values of one access need and
// the maths on top of them: while some wait for memory, others work. In tiles a thread has several elements,
// and needs registers to find them as well.
template <Access kAccess, class Body>
constexpr int resident_blocks() {
  if (kAccess == kByElement) return kTileResident<Body>;
  constexpr int kRegisters = 65536 / kThreads, kGrain = 8, kWords = sizeof(typename Body::T) / sizeof(float);
  constexpr int kNeeded = Body::kOperands * Body::kWidth * kWords + (kWords == 1 ? 16 : 48);
  return kRegisters / ((kNeeded + kGrain - 1) / kGrain * kGrain);
}
template <Access kAccess, class Body>
constexpr int kResident = resident_blocks<kAccess, Body>();

// A part of the last pass of a step: that of `Body`, or no more than the clearing of gradients.
template <Access kAccess, class Body>
__device__ __forceinline__ void go_over_part(const Launch& launch, const Chunk& of_plan, int part) {
  const bool clears_only = left_out(launch.found_inf);
  if constexpr (kAccess == kByElement) {
    for_tiles<Body>(launch, of_plan, part, clears_only);
  } else {
    const Chunk chunk = of_plan;
    Body body(launch, chunk, /*with_scalars=*/false);
    if (!clears_only) {
      for_words(body, chunk, part, [&] { body.take_scalars(launch, chunk); });
    } else if (body.clears) {
      for_words(Clear<Body>(launch, chunk), chunk, part);
    }
  }
}

template <Access kAccess, class Body>
__global__ void __launch_bounds__(kThreads, kResident<kAccess, Body>)
    last_pass(const __grid_constant__ Launch launch) {
  constexpr int kOf = kParts<kAccess, Body>;
  go_over_part<kAccess, Body>(launch, launch.chunks[blockIdx.x / kOf].chunk,
                              static_cast<int>(blockIdx.x % kOf));
}

template <Access kAccess, class Body>
void launch_last_pass(const Launch& launch) {
  launch_blocks(last_pass<kAccess, Body>, launch.chunk_count * kParts<kAccess, Body>, launch.queue, launch);
}

template <Access kAccess, class Rule, class Weight, class State>
void launch_update(const Launch& launch) {
  launch_last_pass<kAccess, Update<Operands<Rule, Weight, State>>>(launch);
}

}  // namespace fusedstep::cuda
