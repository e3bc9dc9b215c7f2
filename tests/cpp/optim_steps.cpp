// Steps the C++ optimizers as Python asks: tests/test_cpp.py compares the bits with those of its own.
//
//   fusedstep_optim_steps CASES RESULTS
//
// CASES, as torch.save() writes it, is a list of [class, options by name, weights, gradients of each step];
// RESULTS is a tuple of the weights after these steps. Both languages name their options alike.
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "tests/cpp/optim_cases.h"

namespace fusedstep::optim {
namespace {

// By their names, as a loaded archive does; given none, they stay the defaults.
void set_options(torch::optim::OptimizerOptions& options, const c10::Dict<c10::IValue, c10::IValue>& given) {
  if (given.empty()) return;
  torch::serialize::OutputArchive written;
  for (const auto& option : given) written.write(option.key().toStringRef(), option.value());
  std::stringstream file;
  written.save_to(file);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  options.serialize(archive);
}

template <class Row>
bool step_if_named(const std::string& name, const c10::IValue& options, const Tensors& weights,
                   c10::ArrayRef<c10::IValue> gradients) {
  if (name_of<Row>() != name) return false;
  typename Row::Optimizer optimizer(weights);
  set_options(optimizer.param_groups()[0].options(), options.toGenericDict());
  for (const c10::IValue& step : gradients) {
    for (size_t i = 0; i < weights.size(); ++i) weights[i].mutable_grad() = step.toListRef()[i].toTensor();
    optimizer.step();
  }
  return true;
}

template <class... Row>
c10::IValue weights_after(testing::Types<Row...>, c10::ArrayRef<c10::IValue> asked) {
  const std::string name = asked[0].toStringRef();
  Tensors weights;
  for (const c10::IValue& weight : asked[2].toListRef()) weights.push_back(weight.toTensor());
  TORCH_CHECK((step_if_named<Row>(name, asked[1], weights, asked[3].toListRef()) || ...),
              "tests/cpp/optim_cases.h has no row for ", name, " in its list Rows");
  return c10::ivalue::Tuple::create({weights.begin(), weights.end()});
}

void answer(const char* cases, const char* results) {
  std::ifstream in(cases, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
  const c10::IValue asked = torch::pickle_load(bytes);
  std::vector<c10::IValue> found;
  for (const c10::IValue& each : asked.toListRef()) {
    found.push_back(weights_after(Rows(), each.toListRef()));
  }
  const std::vector<char> saved = torch::pickle_save(c10::ivalue::Tuple::create(std::move(found)));
  std::ofstream(results, std::ios::binary).write(saved.data(), static_cast<std::streamsize>(saved.size()));
}

}  // namespace
}  // namespace fusedstep::optim

int main(int count, char** arguments) {
  if (count != 3) return 2;
  try {
    fusedstep::optim::answer(arguments[1], arguments[2]);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  }
}
