// The backend for tensors that are not on the CPU: a library of its own, which registers itself when it is
// loaded.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "fusedstep/isa.h"
#include "src/core/channels.h"
#include "src/core/chosen_channels.h"
#include "src/core/low_rank_product.h"
#include "src/core/matrix_chain.h"
#include "src/core/matrix_passes.h"
#include "src/steps/factored.h"
#include "src/steps/projected.h"
#include "src/steps/step.h"

namespace fusedstep {

// A plan's counterpart on its device. Work is queued on the device's current stream; nothing waits for it.
class DevicePlan {
 public:
  virtual ~DevicePlan() = default;

  // Prepares a step as prepare_step() does, with numbers on the host. The plan and the inputs must outlive
  // the step; all else is queued.
  virtual std::unique_ptr<PreparedStep> prepare(Plan& plan, const BoundRule& rule, std::span<double> numbers,
                                                const StepOptions& options, const DeviceInputs& inputs) = 0;
  // The same with numbers on the device, of which the step makes the next there first.
  virtual std::unique_ptr<PreparedStep> prepare_counted(Plan& plan, const BoundRule& rule,
                                                        std::span<float* const> numbers,
                                                        const StepOptions& options,
                                                        const DeviceInputs& inputs) = 0;
  // Throws std::runtime_error, naming the tensor, if a sparse gradient has an entry for a row that its tensor
  // does not have. It waits for the device. It does not look at gradients whose entries need no order (see
  // RowIndex): if an index of these is out of range, the step fails on the device.
  virtual void check_rows(Plan& plan) = 0;
  // Adds grad_norm2() to a number on the device.
  virtual void add_grad_norm2(Plan& plan, double* sum) = 0;
};

// The passes around the matrix products of a step (src/core/matrix_passes.h) on a device.
struct DevicePasses {
  void (*average)(int device, PassFormat format, std::span<const PassTensor> tensors,
                  const AverageOptions& options);
  void (*move)(int device, PassFormat format, std::span<const PassTensor> tensors, double keep);
  // The numbers that normalize() needs room for.
  size_t (*norm_sums)(std::span<const NormTensor> tensors);
  void (*normalize)(int device, NormFormat format, std::span<const NormTensor> tensors,
                    const NormOptions& options, float* sums);
  // By channels (src/core/channels.h).
  void (*sum_squares)(int device, SquaresFormat format, std::span<const SquaresTensor> tensors);
  void (*scale)(int device, bool is_double, std::span<const ScaleTensor> tensors,
                const ScaleOptions& options);
  void (*limit)(int device, bool is_double, std::span<const ScaleTensor> tensors,
                const LimitOptions& options);
  void (*move_channels)(int device, PassFormat format, std::span<const MoveTensor> tensors, double keep);
  // By channels that are chosen (src/core/chosen_channels.h).
  void (*choose)(int device, PassFormat format, std::span<const ChosenTensor> tensors,
                 const ChoiceMemory& memory, const ChoiceOptions& options);
  void (*move_chosen)(int device, PassFormat format, std::span<const ChosenTensor> tensors,
                      const ChoiceMemory& memory, double keep);
};

// Chains of matrix products on a device.
struct DeviceChains {
  bool (*are_taken)(int device);
  int64_t (*workspace_bytes)(std::span<const ChainBatch> batches);
  // X and Y must be aligned to 16 bytes, and have a multiple of 8 columns: else it throws std::runtime_error.
  void (*run)(int device, bool is_bfloat16, std::span<const ChainBatch> batches, std::byte* workspace);
};

// Takes products of many shapes on a device, in TF32 or `in_two` parts of TF32 for float32's accuracy.
// Returns false, and takes none, where torch's products are as good: on other GPUs, for addresses or sides
// that are no multiples of 16 bytes, and for products that are few or long.
using LowRankProducts = bool (*)(int device, std::span<const LowRankProduct> products,
                                 ProductPrecision precision);

// Makes a part of a step of tensors on a device, whose operands must outlive it.
using DeviceFactoredStepFactory = std::unique_ptr<PreparedStep> (*)(int device,
                                                                    std::vector<FactoredTensor> tensors,
                                                                    const OptionsOfTensors& options,
                                                                    FactoredPart part,
                                                                    const DeviceInputs& inputs);
using DevicePlanFactory = std::unique_ptr<DevicePlan> (*)(int device);

// Sets the functions that make the plans, and the steps, of CUDA tensors, or take them.
FUSEDSTEP_API void register_cuda(DevicePlanFactory factory);
FUSEDSTEP_API void register_cuda_factored(DeviceFactoredStepFactory factory);
FUSEDSTEP_API void register_cuda_projected(ProjectedStep step);
FUSEDSTEP_API void register_cuda_passes(DevicePasses passes);
FUSEDSTEP_API void register_cuda_chains(DeviceChains chains);
FUSEDSTEP_API void register_cuda_low_rank_products(LowRankProducts products);
// These throw std::runtime_error if there is no such library in the process.
std::unique_ptr<DevicePlan> new_device_plan(int device);
std::unique_ptr<PreparedStep> new_factored_step(int device, std::vector<FactoredTensor> tensors,
                                                const OptionsOfTensors& options, FactoredPart part,
                                                const DeviceInputs& inputs = {});
void projected_step(int device, const BoundRule& rule, double step, const ProjectedTensor& tensor);
const DevicePasses& device_passes();
const DeviceChains& device_chains();
bool low_rank_products(int device, std::span<const LowRankProduct> products, ProductPrecision precision);

}  // namespace fusedstep
