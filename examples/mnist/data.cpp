#include "data.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <stdexcept>

#include "idx.h"

namespace mnist {
namespace {

bool is_complete(const std::filesystem::path& folder) {
  constexpr std::array kNames{"train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte",
                              "t10k-labels-idx1-ubyte"};
  return std::ranges::all_of(kNames, [&](const char* name) { return locate(folder, name).has_value(); });
}

}  // namespace

std::filesystem::path find_data(const std::string& named, const std::vector<std::filesystem::path>& roots) {
  const char* const variable = std::getenv("FUSEDSTEP_DATA");
  const std::string from_environment = variable ? variable : "";
  const std::string& chosen = named.empty() ? from_environment : named;

  // Searches no other place if the user has named one.
  std::vector<std::filesystem::path> places;
  if (!chosen.empty()) {
    places.emplace_back(chosen);
  } else {
    for (const auto& root : roots) {
      if (std::ranges::find(places, root / "data") == places.end()) places.push_back(root / "data");
    }
  }
  std::string tried;
  for (const auto& place : places) {
    for (const auto& folder : {place, place / "mnist"}) {
      if (is_complete(folder)) return folder;
      tried += (tried.empty() ? "" : ", ") + folder.string();
    }
  }
  throw std::runtime_error("the four MNIST files are in none of " + tried +
                           ": name their folder by --data or FUSEDSTEP_DATA, or let `./run.sh mnist` or "
                           "`python examples/mnist/data.py` fetch them");
}

}  // namespace mnist
