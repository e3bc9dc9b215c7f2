#include "src/backend.h"

#include <dlfcn.h>

#include <filesystem>
#include <mutex>
#include <stdexcept>
#include <string>

namespace fusedstep {
namespace {

DevicePlanFactory cuda_factory = nullptr;

// Loads the library beside this one, which registers itself. Returns the error, or nothing.
std::string load_cuda() {
  Dl_info self{};
  if (dladdr(reinterpret_cast<const void*>(&register_cuda), &self) == 0)
    return "where it should be is unknown";
  const auto path = std::filesystem::path(self.dli_fname).replace_filename("libfusedstep_cuda.so");
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr) return "";
  const char* const error = dlerror();
  return error != nullptr ? error : "it could not be loaded";
}

}  // namespace

void register_cuda(DevicePlanFactory factory) { cuda_factory = factory; }

std::unique_ptr<DevicePlan> new_device_plan(int device) {
  static std::mutex loading;
  const std::lock_guard lock(loading);
  if (const std::string error = cuda_factory != nullptr ? "" : load_cuda(); !error.empty()) {
    throw std::runtime_error("weights on a CUDA device need libfusedstep_cuda.so, built where nvcc is: " +
                             error);
  }
  return cuda_factory(device);
}

}  // namespace fusedstep
