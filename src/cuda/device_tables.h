// The tables of tensors and gradients that the kernels of a plan read on a device, brought up to date with
// what was bound.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cuda_kernels/kernel_table.h"
#include "src/cuda/memory.h"
#include "src/run/backend.h"

namespace fusedstep::cuda {

// The passes that tensors need: those of PassKernels for codes, or others.
enum class Coding : uint8_t { kNone, kStates, kWeight };

// Tensors that one launch of a pass can take together.
struct LaunchKind {
  Format format;
  Access access;
  bool can_store;  // the update between two phases
  Coding coding;

  auto operator<=>(const LaunchKind&) const = default;
};

// Chunks [first, last) of the device's list, which are of tensors of one kind.
struct LaunchGroup {
  LaunchKind of;
  int64_t first, last;
  bool one_chunk;  // true if each tensor has one
};

// The device's tables of gradients, and the chunks in the order of the launches.
struct GradTables {
  Grad* grads;
  GradRows* rows;
  int64_t* row_dims;
  NumberedChunk* chunks;
};

// The gradients that a step takes: their tables, and the launches that they need.
struct Grads {
  GradTables tables;
  std::vector<LaunchKind> classes;
  std::vector<LaunchGroup> groups;
  bool has_rows = false;
};

// The device's other tables.
struct PlanTables {
  TensorTask* tensors;
  int64_t* dims;
  unsigned long long* found_indices;
  double *partials, *ratios;
  Scalars* scalars;
  uint64_t* draws;
  float** numbers;
  TensorProgress* progress;
  WaitingChunk* waiting;
  ChunkQueue* queue;
  CodeTable* codes;  // of code_maps()
};

// The tables of one plan, and the memory that they are in.
class DeviceTables {
 public:
  // Brings the tables up to date with what was bound.
  void refresh(Plan& plan, const StepOptions& options, cudaStream_t stream);
  // Tells the device where the numbers of each weight are.
  void find_numbers(std::span<float* const> numbers, cudaStream_t stream);

  // After refresh(). The gradients are those of the step under way.
  const PlanTables& plan() const { return tables_; }
  const Grads& grads() const { return *grads_; }
  // Copies a list to a table, by the next send().
  template <class T>
  void upload(T* to, const std::vector<T>& from) {
    const void* const bytes = static_cast<const void*>(from.data());
    if (!from.empty()) uploads_.add(reinterpret_cast<std::byte*>(to), bytes, from.size() * sizeof(T));
  }
  void send(cudaStream_t stream) { uploads_.send(stream); }

 private:
  void refuse_if_capturing(cudaStream_t stream) const;
  void describe_tensors(const Plan& plan);
  CodedTask on_device(const CodedState& state) const;
  void describe_grads(const Plan& plan, Grads& known, bool with_chunks);
  void allocate(size_t tensors, size_t chunks, size_t dims, size_t row_dims);

  uint64_t operands_version_ = 0, grads_version_ = 0;  // of the plan, as the device has it
  bool is_current_ = false;                            // false: the device may have only a part of it
  DeviceBytes memory_;
  size_t bytes_ = 0;
  PlanTables tables_{};
  Grads eager_grads_{}, captured_grads_{};
  const Grads* grads_ = &eager_grads_;  // those of the step under way
  std::vector<float*> numbers_;
  Uploads uploads_;
  bool captured_ = false;
  std::vector<DeviceBytes> kept_;  // for graphs captured with them
};

}  // namespace fusedstep::cuda
