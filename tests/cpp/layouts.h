// The layouts that every rule is tested over.
#pragma once
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "tests/cpp/model.h"

namespace fusedstep::test {

struct LayoutCase {
  const char* name;
  Sizes sizes;
  Forms forms;
};

std::vector<LayoutCase> layout_cases();

class RandomLayouts {
 public:
  explicit RandomLayouts(unsigned seed) : random_(seed) {}

  int below(int n) { return std::uniform_int_distribution<int>(0, n - 1)(random_); }

  Sizes sizes() {
    if (below(3) == 0) return {1 + below(60), 1 + below(300)};  // large enough for blocks of every kind
    Sizes sizes(below(7));
    int64_t elements = 1;
    for (int64_t& size : sizes) {
      size = below(8) == 0 ? 1 + below(400) : below(12);
      if (elements * size > 20000) size = 1;
      elements = std::max<int64_t>(elements * size, 1);
    }
    return sizes;
  }

  // Any order of the dimensions, any slice.
  Form form(const Sizes& sizes) {
    std::vector<int> order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    if (below(2) != 0) std::ranges::shuffle(order, random_);
    Sizes parent = sizes, start(sizes.size(), 0), step(sizes.size(), 1);
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (below(3) != 0) continue;
      step[d] = 1 + below(3);
      start[d] = below(4);
      parent[d] = start[d] + sizes[d] * step[d] + below(4);
    }
    return slice(parent, start, step, order);
  }

  // The same with some dimensions expanded, for gradients.
  Form expanded_form(const Sizes& sizes) {
    Form form = this->form(sizes);
    for (int64_t& stride : form.strides) {
      if (below(5) == 0) stride = 0;
    }
    return form;
  }

  Forms forms(const Sizes& sizes) {
    const Form weight = form(sizes);
    const bool alike = below(3) == 0;
    if (alike) return Forms::all(weight);
    return {weight, expanded_form(sizes), {below(2) != 0 ? weight : form(sizes)}};
  }

 private:
  std::mt19937 random_;
};

}  // namespace fusedstep::test
