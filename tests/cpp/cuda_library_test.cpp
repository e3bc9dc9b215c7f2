#include "src/run/cuda_library.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace fusedstep {
namespace {

namespace fs = std::filesystem;

void touch(const fs::path& path) { const std::ofstream file(path); }

TEST(CudaLibrary, BesideTheLibraryElseInThePackageOfTheWheel) {
  const fs::path site = fs::temp_directory_path() / ("fusedstep-site-" + std::to_string(getpid()));
  const fs::path own = site / "fusedstep/lib/libfusedstep.so";
  const fs::path beside = own.parent_path() / "libfusedstep_cuda.so";
  const fs::path packaged = site / "fusedstep_cuda/lib/libfusedstep_cuda.so";
  for (const fs::path& path : {beside, packaged}) create_directories(path.parent_path());
  EXPECT_EQ(cuda_library_of(own), beside);
  touch(packaged);
  EXPECT_EQ(weakly_canonical(cuda_library_of(own)), weakly_canonical(packaged));
  touch(beside);
  EXPECT_EQ(cuda_library_of(own), beside);
  remove_all(site);
}

}  // namespace
}  // namespace fusedstep
