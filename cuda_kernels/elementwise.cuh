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

  template <int N>
  __device__ __forceinline__ Read<N> load_all(const At& at) const {
    Read<N> read;
    load(weight + at.offset[kWeight], read.weight);
    load(grad + at.offset[kGrad], read.grad);
#pragma unroll
    for (int k = 0; k < kStates; ++k) load(state[k] + at.offset[kFirstState + k], read.state[k]);
    return read;
  }
  template <int N>
  __device__ __forceinline__ void store_weight(const At& at, const Read<N>& read) const {
    store(weight + at.offset[kWeight], read.weight);
  }
  template <int N>
  __device__ __forceinline__ void store_states(const At& at, const Read<N>& read) const {
#pragma unroll
    for (int k = 0; k < kStates; ++k) store(state[k] + at.offset[kFirstState + k], read.state[k]);
  }
  // The gradient in memory times the scale, as memory holds it.
  template <int N>
  __device__ __forceinline__ void scale_grad(const At& at, T (&x)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = Codec<Weight>::decode(Codec<Weight>::encode(x[j] * scale));
    store(grad + at.offset[kGrad], x);
  }
  template <int N>
  __device__ __forceinline__ void clear_grad(const At& at) const {
    const T zeros[N] = {};
    store(grad + at.offset[kGrad], zeros);
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

// The body of a pass over the gradients of a step that is left out.
template <class Operands>
struct Clear : Operands {
  struct Nothing {};
  using Operands::Operands;
  template <int N>
  __device__ Nothing load(Width<N>, const typename Operands::At&) const {
    return {};
  }
  template <int N>
  __device__ void finish(Width<N>, const typename Operands::At& at, const Nothing&) const {
    this->template clear_grad<N>(at);
  }
};

template <class Operands>
struct Update : Operands {
  using Base = Operands;
  using Operands::Operands;
  using At = typename Operands::At;
  using T = typename Operands::T;
  template <int N>
  using Read = typename Operands::template Read<N>;

  template <int N>
  __device__ __forceinline__ Read<N> load(Width<N>, const At& at) const {
    return this->template load_all<N>(at);
  }
  template <int N>
  __device__ __forceinline__ void finish(Width<N>, const At& at, Read<N> read) const {
    if (this->scales) this->scale_grad(at, read.grad);
    this->for_each(read, [&](T& p, T g, auto& s, int) { Operands::Rule::update(this->scalars, p, g, s); });
    this->store_weight(at, read);
    this->store_states(at, read);
    if (this->clears) this->template clear_grad<N>(at);
  }
};

// The last pass of a step: that of `Body`, or no more than the clearing of gradients.
template <Access kAccess, class Body>
__device__ __forceinline__ void run_last_pass(const Launch& launch) {
  const Chunk chunk = launch.chunks[blockIdx.x / kParts].chunk;
  const int part = static_cast<int>(blockIdx.x % kParts);
  const BlockLayout& layout = launch.tensors[chunk.tensor].layout;
  const Body body(launch, chunk);
  if (!left_out(launch.found_inf)) {
    for_part<kAccess>(body, layout, chunk, part);
  } else if (body.clears) {
    for_part<kAccess>(Clear<typename Body::Base>(launch, chunk), layout, chunk, part);
  }
}

template <Access kAccess, class Rule, class Weight, class State>
__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ Launch launch) {
  run_last_pass<kAccess, Update<Operands<Rule, Weight, State>>>(launch);
}

template <Access kAccess, class Rule, class Weight, class State>
void launch_update(const Launch& launch) {
  launch_blocks(update_kernel<kAccess, Rule, Weight, State>, launch.chunk_count * kParts, launch.stream,
                launch);
}

}  // namespace fusedstep::cuda
