// Device memory, and the pinned host memory that is copied there.
#pragma once
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

namespace fusedstep::cuda {

// Throws std::runtime_error with the words of the CUDA runtime unless `error` is cudaSuccess.
void check(cudaError_t error, const char* doing);

// Makes a device the current one for as long as it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
};

// Bytes on the current device, or pinned bytes of the host. They can be allocated while a graph is captured.
struct FreeDevice {
  void operator()(std::byte* memory) const;
};
struct FreePinned {
  void operator()(std::byte* memory) const;
};
using DeviceBytes = std::unique_ptr<std::byte[], FreeDevice>;
using PinnedBytes = std::unique_ptr<std::byte[], FreePinned>;
DeviceBytes new_device_bytes(size_t bytes);
PinnedBytes new_pinned_bytes(size_t bytes);

// torch's, on which work for a device is queued.
cudaStream_t current_stream(int device);
bool is_capturing(cudaStream_t stream);
// Returns whether a kernel may begin before the one ahead of it has ended.
bool can_start_early(int device);

// Offsets for lists that lie in device memory one behind another.
class TableOffsets {
 public:
  template <class T>
  size_t place(size_t count) {
    constexpr size_t kAlignment = 256;
    const size_t offset = (bytes_ + kAlignment - 1) / kAlignment * kAlignment;
    bytes_ = offset + count * sizeof(T);
    return offset;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

// Copies to the device without waiting. The bytes are staged in one of a few pinned slots, which is used
// again when its copies are over.
class Uploads {
 public:
  Uploads() = default;
  Uploads(const Uploads&) = delete;
  Uploads& operator=(const Uploads&) = delete;
  ~Uploads();

  void add(std::byte* to, const void* from, size_t bytes);
  // Forgets what has been added, after a step that has failed.
  void clear();
  // Copies what has been added.
  void send(cudaStream_t stream);
  // The same, but waits for the copies and leaves nothing in a graph that is captured.
  void send_apart();

 private:
  struct Part {
    std::byte* to;
    size_t begin, end;  // in staged_
  };
  struct Slot {
    PinnedBytes memory;
    size_t bytes = 0;
    cudaEvent_t copied = nullptr;
  };
  void copy_parts(const std::byte* staged, cudaStream_t stream);

  std::vector<Part> parts_;
  std::vector<std::byte> staged_;
  std::array<Slot, 4> slots_;
  size_t next_ = 0;
};

}  // namespace fusedstep::cuda
