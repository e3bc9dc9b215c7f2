// Steps the C++ optimizers as Python asks: tests/test_cpp.py compares the bits with those of its own.
//
//   fusedstep_optim_steps CASES RESULTS DEVICE
//
// CASES, as torch.save() writes it, is a list of [class, options by name, weights, gradients of each step,
// what happens before the second half of the steps, options of that]. RESULTS is a tuple of the weights after
// these steps, and of the states of each as pairs of a name and a tensor. Both languages name their options
// alike. The steps are made on the device, "cpu" or "cuda"; tensors in the files are the CPU's. What happens:
//
//   ""          nothing
//   "set"       the group's options are set
//   "load"      an optimizer that is made with these options loads the archive of the first
//   "convert"   both
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
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
std::unique_ptr<typename Row::Optimizer> loaded_from(const typename Row::Optimizer& optimizer,
                                                     const c10::Dict<c10::IValue, c10::IValue>& options) {
  auto next = std::make_unique<typename Row::Optimizer>(optimizer.parameters());
  set_options(next->defaults(), options);
  std::stringstream file;
  torch::save(optimizer, file);
  torch::load(*next, file);
  return next;
}

// Pairs of a name and a tensor: all but the numbers. Python's torch.load() knows no float8 of torch::save().
template <class State>
c10::IValue contents(const State& state) {
  std::vector<c10::IValue> found;
  const auto add = [&](const std::string& name, const Tensor& tensor) {
    if (!tensor.defined()) return;
    const bool is_float8 = tensor.scalar_type() == torch::kFloat8_e4m3fn;
    found.emplace_back(
        c10::ivalue::Tuple::create(name, (is_float8 ? tensor.view(torch::kUInt8) : tensor).cpu()));
  };
  for (size_t k = 0; k < std::size(State::kStates); ++k) {
    add(State::kStates[k].name, state.slot(k));
    add(std::string(State::kStates[k].name) + "_absmax", state.absmax(k));
  }
  add("master_param", state.master_param());
  add("low_param", state.low_param());
  add("compensation", state.compensation());
  return c10::ivalue::Tuple::create(std::move(found));
}

template <class Row>
bool step_if_named(c10::ArrayRef<c10::IValue> asked, const Tensors& weights, c10::IValue& result) {
  if (name_of<Row>() != asked[0].toStringRef()) return false;
  auto optimizer = std::make_unique<typename Row::Optimizer>(weights);
  set_options(optimizer->param_groups()[0].options(), asked[1].toGenericDict());
  const auto gradients = asked[3].toListRef();
  const std::string& change = asked[4].toStringRef();
  for (size_t step = 0; step < gradients.size(); ++step) {
    const bool changes = step == gradients.size() / 2 && !change.empty();
    const auto options = asked[5].toGenericDict();
    if (changes && change != "load") set_options(optimizer->param_groups()[0].options(), options);
    if (changes && change != "set") optimizer = loaded_from<Row>(*optimizer, options);
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i].mutable_grad() = gradients[step].toListRef()[i].toTensor().to(weights[i].device());
    }
    optimizer->step();
  }
  std::vector<c10::IValue> states;
  for (const Tensor& weight : weights) {
    const auto& state = *optimizer->state().at(weight.unsafeGetTensorImpl());
    states.push_back(contents(static_cast<const typename Row::State&>(state)));
  }
  std::vector<c10::IValue> stepped;
  for (const Tensor& weight : weights) stepped.emplace_back(weight.cpu());
  result = c10::ivalue::Tuple::create(c10::ivalue::Tuple::create(std::move(stepped)),
                                      c10::ivalue::Tuple::create(std::move(states)));
  return true;
}

template <class... Row>
c10::IValue result_of(testing::Types<Row...>, c10::ArrayRef<c10::IValue> asked, const torch::Device& device) {
  Tensors weights;
  for (const c10::IValue& weight : asked[2].toListRef()) weights.push_back(weight.toTensor().to(device));
  c10::IValue result;
  TORCH_CHECK((step_if_named<Row>(asked, weights, result) || ...), "tests/cpp/optim_cases.h has no row for ",
              asked[0].toStringRef(), " in its list Rows");
  return result;
}

void answer(const char* cases, const char* results, const torch::Device& device) {
  std::ifstream in(cases, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
  const c10::IValue asked = torch::pickle_load(bytes);
  std::vector<c10::IValue> found;
  for (const c10::IValue& each : asked.toListRef()) {
    found.push_back(result_of(Rows(), each.toListRef(), device));
  }
  const std::vector<char> saved = torch::pickle_save(c10::ivalue::Tuple::create(std::move(found)));
  std::ofstream(results, std::ios::binary).write(saved.data(), static_cast<std::streamsize>(saved.size()));
}

}  // namespace
}  // namespace fusedstep::optim

int main(int count, char** arguments) {
  if (count != 4) return 2;
  try {
    fusedstep::optim::answer(arguments[1], arguments[2], torch::Device(arguments[3]));
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  }
}
