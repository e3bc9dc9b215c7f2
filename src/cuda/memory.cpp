#include "src/cuda/memory.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstring>
#include <stdexcept>
#include <string>

namespace fusedstep::cuda {
namespace {

// Lets a thread allocate while a stream of it is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

void check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("CUDA error while ") + doing + ": " + cudaGetErrorString(error));
}

DeviceGuard::DeviceGuard(int device) {
  check(cudaGetDevice(&before_), "asking for the current device");
  if (device != before_) check(cudaSetDevice(device), "choosing the weights' device");
}

DeviceGuard::~DeviceGuard() { cudaSetDevice(before_); }

void FreeDevice::operator()(std::byte* memory) const {
  const RelaxedCapture relaxed;
  cudaFree(memory);
}

void FreePinned::operator()(std::byte* memory) const {
  const RelaxedCapture relaxed;
  cudaFreeHost(memory);
}

DeviceBytes new_device_bytes(size_t bytes) {
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "allocating a plan's tables");
  return DeviceBytes(static_cast<std::byte*>(memory));
}

PinnedBytes new_pinned_bytes(size_t bytes) {
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, bytes, cudaHostAllocDefault), "allocating pinned memory");
  return PinnedBytes(static_cast<std::byte*>(memory));
}

cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(device, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("torch has no current stream on cuda:" + std::to_string(device));
  }
  return static_cast<cudaStream_t>(stream);
}

bool can_start_early(int device) {
  int capability = 0;
  check(cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, device),
        "asking for a device");
  return capability >= 9;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "asking whether a graph is being captured");
  return status != cudaStreamCaptureStatusNone;
}

Uploads::~Uploads() {
  for (const Slot& slot : slots_) {
    if (slot.copied != nullptr) cudaEventDestroy(slot.copied);
  }
}

void Uploads::add(std::byte* to, const void* from, size_t bytes) {
  const auto* const data = static_cast<const std::byte*>(from);
  parts_.push_back({to, staged_.size(), staged_.size() + bytes});
  staged_.insert(staged_.end(), data, data + bytes);
}

void Uploads::copy_parts(const std::byte* staged, cudaStream_t stream) {
  for (const auto& [to, begin, end] : parts_) {
    check(cudaMemcpyAsync(to, staged + begin, end - begin, cudaMemcpyHostToDevice, stream),
          "copying a plan's tables");
  }
}

void Uploads::clear() {
  parts_.clear();
  staged_.clear();
}

void Uploads::send(cudaStream_t stream) {
  if (parts_.empty()) return;
  const size_t bytes = staged_.size();
  Slot& slot = slots_[next_++ % slots_.size()];
  if (slot.copied == nullptr) {
    check(cudaEventCreateWithFlags(&slot.copied, cudaEventDisableTiming), "making an event");
  } else {
    check(cudaEventSynchronize(slot.copied), "waiting for an earlier copy");
  }
  if (slot.bytes < bytes) {
    slot.memory = new_pinned_bytes(bytes);
    slot.bytes = bytes;
  }
  std::memcpy(slot.memory.get(), staged_.data(), bytes);
  copy_parts(slot.memory.get(), stream);
  clear();
  check(cudaEventRecord(slot.copied, stream), "recording an event");
}

void Uploads::send_apart() {
  const RelaxedCapture relaxed;
  cudaStream_t apart = nullptr;
  check(cudaStreamCreateWithFlags(&apart, cudaStreamNonBlocking), "making a stream");
  const std::unique_ptr<CUstream_st, cudaError_t (*)(cudaStream_t)> owner(apart, cudaStreamDestroy);
  copy_parts(staged_.data(), apart);
  check(cudaStreamSynchronize(apart), "copying a plan's tables");
  clear();
}

}  // namespace fusedstep::cuda
