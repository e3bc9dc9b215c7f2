#include "src/run/backend.h"

#include <dlfcn.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "src/run/cuda_library.h"

namespace fusedstep {
namespace {

DevicePlanFactory plan_factory = nullptr;
DeviceFactoredStepFactory factored_step_factory = nullptr;
ProjectedStep projected_step_taker = nullptr;
DevicePasses passes{};
DeviceChains chains{};
LowRankProducts low_rank_taker = nullptr;

// Loads the library beside this one, which registers itself. Returns the error, or nothing.
std::string load_cuda() {
  Dl_info self{};
  if (dladdr(reinterpret_cast<const void*>(&register_cuda), &self) == 0)
    return "where it should be is unknown";
  const auto path = cuda_library_of(self.dli_fname);
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr) return "";
  const char* const error = dlerror();
  return error != nullptr ? error : "it could not be loaded";
}

// Loads the library unless it has set this factory.
template <class Factory>
Factory loaded(const Factory& factory) {
  static std::mutex loading;
  const std::lock_guard lock(loading);
  if (const std::string error = factory != nullptr ? "" : load_cuda(); !error.empty()) {
    throw std::runtime_error("weights on a CUDA device need libfusedstep_cuda.so, built where nvcc is: " +
                             error);
  }
  return factory;
}

}  // namespace

void register_cuda(DevicePlanFactory factory) { plan_factory = factory; }
void register_cuda_factored(DeviceFactoredStepFactory factory) { factored_step_factory = factory; }
void register_cuda_projected(ProjectedStep step) { projected_step_taker = step; }
void register_cuda_passes(DevicePasses those) { passes = those; }
void register_cuda_chains(DeviceChains those) { chains = those; }
void register_cuda_low_rank_products(LowRankProducts products) { low_rank_taker = products; }

std::unique_ptr<DevicePlan> new_device_plan(int device) { return loaded(plan_factory)(device); }

std::unique_ptr<PreparedStep> new_factored_step(int device, std::vector<FactoredTensor> tensors,
                                                const OptionsOfTensors& options, FactoredPart part,
                                                const DeviceInputs& inputs) {
  return loaded(factored_step_factory)(device, std::move(tensors), options, part, inputs);
}

void projected_step(int device, const BoundRule& rule, double step, const ProjectedTensor& tensor) {
  loaded(projected_step_taker)(device, rule, step, tensor);
}

const DevicePasses& device_passes() {
  loaded(passes.average);
  return passes;
}

const DeviceChains& device_chains() {
  loaded(chains.run);
  return chains;
}

bool low_rank_products(int device, std::span<const LowRankProduct> products, ProductPrecision precision) {
  return loaded(low_rank_taker)(device, products, precision);
}

}  // namespace fusedstep
