// Both phases of a rule with norms in one launch, for tensors that are gone over in words. A chunk's update
// stays in shared memory until its tensor's ratio is known, if there is room; the weight, read a moment ago,
// is then still in the cache.
//
// Blocks of threads draw chunks by number. One that has drawn a chunk works on it at once, whatever the
// others do, and waits for them only when no chunk is left: so all get on, however many blocks run at a time.
//
// In a block most threads are at a chunk, while a warp of its own controls: it adds up what the chunk before
// has left, and decides what comes next.
#pragma once
#include "cuda_kernels/reduce.cuh"

namespace fusedstep::cuda {

// Blocks that a multiprocessor is to hold, and chunks whose updates each of them holds. With more blocks a
// thread has too few registers, and what it spills goes to memory; more chunks leave the cache too little
// room.
constexpr int kTwoPhaseBlocks = 3, kTwoPhaseSlots = 2;

struct Turn {
  enum Kind { kAccumulate, kApply, kIdle, kEnd } kind;
  int slot;  // where the chunk's updates are held; less than 0: nowhere
  NumberedChunk numbered;
  double ratio;
};

constexpr int kNoSlot = -1;

// The controlling warp of a block. Its first thread keeps the account.
template <template <unsigned> class Rule>
class Control {
 public:
  using Sums2 = SegmentSums<2, kChunkSegments>;

  __device__ explicit Control(const TwoPhaseLaunch& launch)
      : launch_(launch), free_((1u << launch.slots) - 1) {}

  // Decides the turn after `now`, while the other warps are at `now`.
  __device__ __forceinline__ void decide(const Turn& now, Turn& next) {
    if (!leads()) return;
    if (oldest_ != kNoChunk && is_ready(oldest_)) return apply_oldest(next);
    if (!drawn_all_) {
      const auto drawn = static_cast<int64_t>(atomicAdd(&launch_.queue->next, 1u));
      if (drawn < launch_.pass.chunk_count) return accumulate(drawn, next);
      drawn_all_ = true;
    }
    if (oldest_ == kNoChunk) {
      next.kind = Turn::kEnd;
    } else if (now.kind == Turn::kAccumulate) {
      next.kind = Turn::kIdle;  // others may wait for what is to be added up of this very turn
    } else {
      while (!is_ready(oldest_)) __nanosleep(40);
      apply_oldest(next);
    }
  }

  // Completes a turn that is over.
  __device__ __forceinline__ void conclude(const Turn& over, const Sums2& sums) {
    if (over.kind != Turn::kAccumulate && over.kind != Turn::kApply) return;
    const uint32_t tensor = over.numbered.chunk.tensor;
    const TensorTask& task = launch_.pass.tensors[tensor];
    const auto chunks = static_cast<unsigned>(task.last_chunk - task.first_chunk);
    TensorProgress& progress = launch_.progress[tensor];
    if (over.kind == Turn::kAccumulate) {
      double total = 0;
      sums.add_to(total, segments_of(over.numbered.chunk));
      add_lanes<2>(total, launch_.pass.partials + kPartials * over.numbered.number);
      __threadfence();
      __syncwarp();
      __shared__ bool is_last;
      if (leads()) is_last = atomicAdd(&progress.accumulated, 1u) + 1 == chunks;
      __syncwarp();
      if (is_last) find_ratio(tensor, task, progress);
    } else if (leads() && atomicAdd(&progress.applied, 1u) + 1 == chunks) {
      progress = TensorProgress{};
    }
  }

  // Leaves the queue as it was found, the last block does.
  __device__ __forceinline__ void leave() const {
    if (!leads() || atomicAdd(&launch_.queue->left, 1u) + 1 != gridDim.x) return;
    launch_.queue->next = 0;
    launch_.queue->left = 0;
  }

 private:
  static constexpr int64_t kNoChunk = -1;

  static __device__ bool leads() { return threadIdx.x % kWarp == 0; }

  __device__ uint32_t tensor_of(int64_t chunk) const { return launch_.pass.chunks[chunk].chunk.tensor; }

  __device__ bool is_ready(int64_t chunk) const {
    const volatile unsigned& ready = launch_.progress[tensor_of(chunk)].ready;
    return ready != 0;
  }

  __device__ void find_ratio(uint32_t tensor, const TensorTask& task, TensorProgress& progress) const {
    __threadfence();
    const double* const partials = launch_.pass.partials + kPartials * task.first_chunk;
    const Sums<2> norms2 = sum_partials<2, WarpTeam>(partials, task.last_chunk - task.first_chunk);
    if (!leads()) return;
    typename Rule<0>::Hyper hyper;
    memcpy(&hyper, &launch_.hyper, sizeof hyper);
    launch_.pass.ratios[tensor] = Rule<0>::trust_ratio(hyper, norms2.of[0], norms2.of[1]);
    __threadfence();
    *const_cast<volatile unsigned*>(&progress.ready) = 1;
  }

  __device__ void accumulate(int64_t chunk, Turn& next) {
    next.kind = Turn::kAccumulate;
    next.numbered = launch_.pass.chunks[chunk];
    next.slot = kNoSlot;
    if (free_ != 0) {
      next.slot = __ffs(static_cast<int>(free_)) - 1;
      free_ &= free_ - 1;
    }
    launch_.waiting[chunk] = {kNoChunk, next.slot};
    if (oldest_ == kNoChunk) {
      oldest_ = chunk;
    } else {
      launch_.waiting[newest_].next = chunk;
    }
    newest_ = chunk;
  }

  __device__ void apply_oldest(Turn& next) {
    __threadfence();
    const WaitingChunk waiting = launch_.waiting[oldest_];
    next.kind = Turn::kApply;
    next.numbered = launch_.pass.chunks[oldest_];
    next.slot = waiting.slot;
    next.ratio = __ldcg(launch_.pass.ratios + next.numbered.chunk.tensor);
    if (next.slot != kNoSlot) free_ |= 1u << next.slot;
    oldest_ = waiting.next;
  }

  const TwoPhaseLaunch& launch_;
  unsigned free_;                                  // slots, a bit each
  int64_t oldest_ = kNoChunk, newest_ = kNoChunk;  // of the chunks that wait for their ratio
  bool drawn_all_ = false;
};

template <class Body>
__device__ __forceinline__ void go_over(const Body& body, const Chunk& chunk) {
#pragma unroll 1
  for (int part = 0; part < kParts<kInWords, Body>; ++part) for_words(body, chunk, part);
}

// Not inlined, as what is rarely called, for the registers of what is not.
template <class Operands>
__device__ __noinline__ void apply_recomputed(const Launch& launch, const Chunk& chunk, double ratio) {
  go_over(Apply<Operands, Updates::kRecomputed>(launch, chunk, ratio), chunk);
}

template <class Operands>
__device__ __forceinline__ void apply_chunk(const Launch& launch, const Turn& turn,
                                            const typename Operands::T* held) {
  const Chunk& chunk = turn.numbered.chunk;
  if (held != nullptr) {
    go_over(Apply<Operands, Updates::kHeld>(launch, chunk, turn.ratio, held), chunk);
  } else if (launch.stores) {
    go_over(Apply<Operands, Updates::kStored>(launch, chunk, turn.ratio), chunk);
  } else {
    apply_recomputed<Operands>(launch, chunk, turn.ratio);
  }
}

// Clears gradients: all that is left to do of a step that is skipped.
template <class Operands>
__device__ __forceinline__ void clear_chunks(const Launch& launch) {
  for (int64_t c = blockIdx.x; c < launch.chunk_count; c += gridDim.x) {
    const Chunk chunk = launch.chunks[c].chunk;
    const Clear<Apply<Operands, Updates::kStored>> body(launch, chunk);
    if (body.clears) go_over(body, chunk);
  }
}

// Turns change places: one that is under way, and the one before, which becomes the next.
struct Turns {
  Turn of[2];
  SegmentSums<2, kChunkSegments> sums[2];
};

template <template <unsigned> class Rule>
__device__ __noinline__ void control(const TwoPhaseLaunch& launch, Turns& turns) {
  Control<Rule> control(launch);
  turns.of[1].kind = Turn::kIdle;  // there is none before the first
  __syncwarp();
  control.decide(turns.of[1], turns.of[0]);
  __syncthreads();
  for (int now = 0;; now ^= 1) {
    const Turn& turn = turns.of[now];
    Turn& other = turns.of[now ^ 1];
    control.conclude(other, turns.sums[now ^ 1]);
    if (turn.kind == Turn::kEnd) break;
    __syncwarp();
    control.decide(turn, other);
    __syncthreads();
  }
  control.leave();
}

template <class Operands, class T>
__device__ __forceinline__ void work(const Launch& launch, Turns& turns, Found<2, T>& found) {
  T* const slots = static_cast<T*>(block_memory());
  __syncthreads();
  for (int now = 0; turns.of[now].kind != Turn::kEnd; now ^= 1) {
    const Turn& turn = turns.of[now];
    T* const held = turn.slot == kNoSlot ? nullptr : slots + turn.slot * kChunkElements;
    if (turn.kind == Turn::kAccumulate) {
      const Chunk& chunk = turn.numbered.chunk;
      sum_words<T>(chunk, found, turns.sums[now], Accumulate<Operands>(launch, chunk, held));
    } else if (turn.kind == Turn::kApply) {
      apply_chunk<Operands>(launch, turn, held);
    }
    __syncthreads();
  }
}

// kThreads threads that go over chunks, and behind them the controlling warp.
template <template <unsigned> class Rule, unsigned kFlags, class Weight, class State>
__global__ void __launch_bounds__(kThreads + kWarp, kTwoPhaseBlocks)
    two_phase_kernel(const __grid_constant__ TwoPhaseLaunch launch) {
  using Body = Operands<Rule<kFlags>, Weight, State>;
  __shared__ Turns turns;
  __shared__ Found<2, typename Body::T> found;
  const bool controls = threadIdx.x >= kThreads;
  if (left_out(launch.pass.found_inf)) {
    if (!controls) clear_chunks<Body>(launch.pass);
  } else if (controls) {
    control<Rule>(launch, turns);
  } else {
    work<Body>(launch.pass, turns, found);
  }
}

// residents(), asked once a device.
template <auto kKernel>
Residents residents_of(int device, int per_multiprocessor, int most_slots, size_t slot_bytes) {
  static std::mutex mutex;
  static std::map<int, Residents> known;  // by the device
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = known.try_emplace(device);
  if (is_new) at->second = residents(device, kKernel, per_multiprocessor, most_slots, slot_bytes);
  return at->second;
}

template <template <unsigned> class Rule, unsigned kFlags, class Weight, class State>
void launch_two_phases(const TwoPhaseLaunch& asked) {
  TwoPhaseLaunch launch = asked;
  constexpr size_t kSlotBytes = kChunkElements * sizeof(typename Operands<Rule<kFlags>, Weight, State>::T);
  constexpr auto kKernel = two_phase_kernel<Rule, kFlags, Weight, State>;
  const Residents here = residents_of<kKernel>(launch.device, kTwoPhaseBlocks, kTwoPhaseSlots, kSlotBytes);
  launch.slots = here.slots;
  launch_with_memory(kKernel, std::min(here.blocks, launch.pass.chunk_count), kThreads + kWarp,
                     here.slots * kSlotBytes, launch.pass.queue, launch);
}

}  // namespace fusedstep::cuda
