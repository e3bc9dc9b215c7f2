// Where the library of the CUDA kernels is: beside libfusedstep.so, or in the package of the wheel
// fusedstep-cuda, which is installed beside that of fusedstep.
#pragma once
#include <filesystem>

namespace fusedstep {

// `own`: the path of libfusedstep.so. A library that is in neither place is looked for beside it.
inline std::filesystem::path cuda_library_of(const std::filesystem::path& own) {
  constexpr const char* kName = "libfusedstep_cuda.so";
  const std::filesystem::path beside = own.parent_path() / kName;
  const std::filesystem::path packaged = own.parent_path() / "../../fusedstep_cuda/lib" / kName;
  return !exists(beside) && exists(packaged) ? packaged : beside;
}

}  // namespace fusedstep
