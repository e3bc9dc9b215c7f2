// The layouts that every rule is tested over.
#pragma once
#include <vector>

#include "tests/cpp/model.h"

namespace fusedstep::test {

struct LayoutCase {
  const char* name;
  Sizes sizes;
  Forms forms;
};

std::vector<LayoutCase> layout_cases();

}  // namespace fusedstep::test
