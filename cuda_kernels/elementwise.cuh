// A rule's operands in a kernel, and the pass of an elementwise rule: one block of threads a part of a chunk.
#pragma once
#include "cuda_kernels/codecs.cuh"
#include "cuda_kernels/walk.cuh"

namespace fusedstep::cuda {

__device__ __forceinline__ bool left_out(const float* found_inf) {
  return found_inf != nullptr && *found_inf != 0;
}

template <int kStates, class T, int N>
struct Elements {
  T weight[N], grad[N], state[kStates][N];
};

// What a block of threads works on: a tensor's operands under their types, the rule's scalars, and what
// becomes of the gradient.
template <class Rule_, class Weight, class State>
struct Operands {
  using Rule = Rule_;
  using T = ComputeOf<Weight>;
  static constexpr int kStates = Rule::kStates, kOperands = kFirstState + kStates;
  // Elements of one access of the weight.
  static constexpr int kWidth = kWordBytes / sizeof(Weight);
  using At = Place<kOperands>;
  template <int N>
  using Read = Elements<kStates, T, N>;

  Weight *weight, *grad;
  State* state[kStates];
  typename Rule::template Scalars<T> scalars;
  T factor, scale;      // what the gradient is multiplied by as it is read; in memory, before
  bool scales, clears;  // whether it is so multiplied; whether it is zero in the end

  __device__ Operands(const Launch& launch, const Chunk& chunk) {
    const TensorTask& task = launch.tensors[chunk.tensor];
    const Grad& gradient = launch.grads[chunk.tensor];
    weight = static_cast<Weight*>(task.data[kWeight]);
    grad = static_cast<Weight*>(gradient.data);
#pragma unroll
    for (int k = 0; k < kStates; ++k) state[k] = static_cast<State*>(task.data[kFirstState + k]);
    const Scalars& block =
        launch.scalars_of_tensor != nullptr ? launch.scalars_of_tensor[chunk.tensor] : launch.scalars;
    memcpy(&scalars, &block, sizeof scalars);

    const double whole = launch.grad_factor * (launch.more_factor != nullptr ? *launch.more_factor : 1.0);
    scales = gradient.own && launch.use == GradUse::kScale;
    clears = gradient.own && launch.use == GradUse::kClear;
    scale = static_cast<T>(whole);
    factor = static_cast<T>(launch.sign * (scales ? 1.0 : whole));
  }

  template <Reuse kReuse, int N, Reuse kOfWeight = kReuse>
  __device__ __forceinline__ Read<N> load_all(const At& at) const {
    Read<N> read;
    load<kOfWeight>(weight + at.offset[kWeight], read.weight);
    load<kReuse>(grad + at.offset[kGrad], read.grad);
#pragma unroll
    for (int k = 0; k < kStates; ++k) load<kReuse>(state[k] + at.offset[kFirstState + k], read.state[k]);
    return read;
  }
  template <Reuse kReuse, int N>
  __device__ __forceinline__ void store_weight(const At& at, const Read<N>& read) const {
    store<kReuse>(weight + at.offset[kWeight], read.weight);
  }
  template <Reuse kReuse, int N>
  __device__ __forceinline__ void store_states(const At& at, const Read<N>& read) const {
#pragma unroll
    for (int k = 0; k < kStates; ++k) store<kReuse>(state[k] + at.offset[kFirstState + k], read.state[k]);
  }
  // The gradient in memory times the scale, as memory holds it.
  template <int N>
  __device__ __forceinline__ void scale_grad(const At& at, T (&x)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = Codec<Weight>::decode(Codec<Weight>::encode(x[j] * scale));
    store<kOnce>(grad + at.offset[kGrad], x);
  }
  template <int N>
  __device__ __forceinline__ void clear_grad(const At& at) const {
    const T zeros[N] = {};
    store<kOnce>(grad + at.offset[kGrad], zeros);
  }
  // Calls run(p, g, states, j) for each element, with its numbers by reference but for the gradient.
  template <int N, class Run>
  __device__ __forceinline__ void for_each(Read<N>& read, Run run) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      T s[kStates];
#pragma unroll
      for (int k = 0; k < kStates; ++k) s[k] = read.state[k][j];
      run(read.weight[j], read.grad[j] * factor, s, j);
#pragma unroll
      for (int k = 0; k < kStates; ++k) read.state[k][j] = s[k];
    }
  }
};

// What is left of a last pass in a step that is left out: the clearing of gradients.
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
    this->for_each(read, [&](T& p, T g, auto& s, int) { Operands::Rule::update(this->scalars, p, g, s); });
    this->template store_weight<kOnce>(at, read);
    this->template store_states<kOnce>(at, read);
    if (this->clears) this->template clear_grad<N>(at);
  }
};

// Blocks of threads that a multiprocessor is to hold, by the registers that the values of one access need and
// the maths on top of them: while some wait for memory, others work. Element by element, to find the elements
// needs registers as well.
template <Access kAccess, class Body>
constexpr int resident_blocks() {
  if (kAccess == kByElement) return 2;
  constexpr int kRegisters = 65536 / kThreads, kGrain = 8, kWords = sizeof(typename Body::T) / sizeof(float);
  constexpr int kNeeded = Body::kOperands * Body::kWidth * kWords + (kWords == 1 ? 16 : 48);
  return kRegisters / ((kNeeded + kGrain - 1) / kGrain * kGrain);
}
template <Access kAccess, class Body>
constexpr int kResident = resident_blocks<kAccess, Body>();

// The last pass of a step: that of `Body`, or no more than the clearing of gradients.
template <Access kAccess, class Body>
__global__ void __launch_bounds__(kThreads, kResident<kAccess, Body>)
    last_pass(const __grid_constant__ Launch launch) {
  constexpr int kOf = kParts<kAccess, Body>;
  const Chunk chunk = launch.chunks[blockIdx.x / kOf].chunk;
  const int part = static_cast<int>(blockIdx.x % kOf);
  const BlockLayout& layout = launch.tensors[chunk.tensor].layout;
  const Body body(launch, chunk);
  if (!left_out(launch.found_inf)) {
    for_part<kAccess>(body, layout, chunk, part);
  } else if (body.clears) {
    for_part<kAccess>(Clear<Body>(launch, chunk), layout, chunk, part);
  }
}

template <Access kAccess, class Body>
void launch_last_pass(const Launch& launch) {
  launch_blocks(last_pass<kAccess, Body>, launch.chunk_count * kParts<kAccess, Body>, launch.stream, launch);
}

template <Access kAccess, class Rule, class Weight, class State>
void launch_update(const Launch& launch) {
  launch_last_pass<kAccess, Update<Operands<Rule, Weight, State>>>(launch);
}

}  // namespace fusedstep::cuda
