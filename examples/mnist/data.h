#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace mnist {

/// The folder that holds the four MNIST files, gzipped or not: `named` or `named`/mnist, or where `named` is
/// empty the same of the environment's FUSEDSTEP_DATA, else of `data/` in each of `roots`. Throws
/// std::runtime_error when there is none. data.py looks in the same places, and can download the files.
std::filesystem::path find_data(const std::string& named, const std::vector<std::filesystem::path>& roots);

}  // namespace mnist
