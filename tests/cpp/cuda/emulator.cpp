#include "tests/cpp/cuda/emulator.h"

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace fusedstep::emulator {

Index thread_index, block_index, blocks_in_grid;
int launches = 0;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr int kWarp = 32;

// Where to go on. The compiler's own setjmp and longjmp keep no more than that, and do not ask whether a
// jump leads to another stack.
using Place = void* [5];

[[noreturn, gnu::noipa]] void go_on_at(Place& place) { __builtin_longjmp(place, 1); }

// A thread of the block. It lives on from block to block: what makes a context is slow, what jumps between
// stacks is not.
struct Fiber {
  ucontext_t first{};
  Place place;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool started = false, ended = true;
  // Values shown to the other threads of the warp. Two slots, used in turn, so that a thread that runs ahead
  // does not overwrite a slot that is still being read.
  double shown[2] = {};
};

std::vector<std::unique_ptr<Fiber>> fibers;
Place scheduler;
const std::function<void()>* body_to_run = nullptr;
bool in_fiber = false;

// Lets threads pass when all of them that have not ended are here.
struct Barrier {
  int threads = 0, arrived = 0;
  int64_t passed = 0;

  void open_for_all() {
    if (arrived < threads) return;
    arrived = 0;
    ++passed;
  }
  void leave_out_one() {
    --threads;
    open_for_all();
  }
  void wait();
};

Barrier of_block;
std::vector<Barrier> of_warps;

Fiber& self() { return *fibers[thread_index.x]; }
Barrier& warp() { return of_warps[thread_index.x / kWarp]; }

[[gnu::noipa]] void leave() {
  if (__builtin_setjmp(self().place) == 0) go_on_at(scheduler);
}

void enter() {
  for (;;) {
    (*body_to_run)();
    self().ended = true;
    of_block.leave_out_one();
    warp().leave_out_one();
    leave();
  }
}

[[gnu::noipa]] void resume(int thread) {
  thread_index.x = static_cast<unsigned>(thread);
  in_fiber = true;
  if (__builtin_setjmp(scheduler) == 0) {
    if (self().started) go_on_at(self().place);
    self().started = true;
    setcontext(&self().first);
  }
  in_fiber = false;
}

void Barrier::wait() {
  if (!in_fiber) std::abort();  // the first thread of the block did not wait
  const int64_t before = passed;
  ++arrived;
  open_for_all();
  while (passed == before) leave();
}

// Waits for what the others show. Returns the turn.
int show(double value) {
  const auto turn = static_cast<int>(warp().passed % 2);
  self().shown[turn] = value;
  warp().wait();
  return turn;
}

void run_block(int threads) {
  for (int t = static_cast<int>(fibers.size()); t < threads; ++t) {
    fibers.push_back(std::make_unique<Fiber>());
    getcontext(&fibers[t]->first);
    fibers[t]->first.uc_stack.ss_sp = fibers[t]->stack.get();
    fibers[t]->first.uc_stack.ss_size = kStackBytes;
    makecontext(&fibers[t]->first, enter, 0);
  }
  for (const auto& fiber : fibers) fiber->ended = false;
  of_block = {.threads = threads};
  of_warps.assign(threads / kWarp, {.threads = kWarp});
  resume(0);
  if (fibers[0]->ended) {  // nothing to wait for: the others need no stack of their own
    for (int t = 1; t < threads; ++t) {
      thread_index.x = static_cast<unsigned>(t);
      (*body_to_run)();
    }
    return;
  }
  for (bool running = true; running;) {
    running = false;
    for (int t = 0; t < threads; ++t) {
      if (fibers[t]->ended) continue;
      running = true;
      resume(t);
    }
  }
}

}  // namespace

void wait_for_block() { of_block.wait(); }

void wait_for_warp() { warp().wait(); }

double value_of_neighbour(double value, int distance, int width) {
  const auto thread = static_cast<int>(thread_index.x);
  const int turn = show(value);
  return thread % width + distance < width ? fibers[thread + distance]->shown[turn] : value;
}

unsigned largest_of_warp(unsigned value) {
  const auto first = static_cast<int>(thread_index.x) / kWarp * kWarp;
  const int turn = show(value);
  for (int t = first; t < first + kWarp; ++t)
    value = std::max(value, static_cast<unsigned>(fibers[t]->shown[turn]));
  return value;
}

void run(int64_t blocks, int threads, const std::function<void()>& body) {
  ++launches;
  body_to_run = &body;
  blocks_in_grid.x = static_cast<unsigned>(blocks);
  for (int64_t block = 0; block < blocks; ++block) {
    block_index.x = static_cast<unsigned>(block);
    run_block(threads);
  }
}

}  // namespace fusedstep::emulator

// Functions of CUDA's runtime, and of torch, that a plan calls. The host's memory is the device's, and work
// is done when it is asked for.

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 9;  // of whatever is asked for: its capability
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) { return cudaMalloc(memory, bytes); }
cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return ""; }

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}
