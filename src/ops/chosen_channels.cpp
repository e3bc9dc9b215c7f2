// The passes of a step that moves chosen rows or columns of each matrix alone (src/core/chosen_channels.h):
// choose_into before the matrix products, and move_chosen after them, on a device; chosen_updates_into and
// advance_and_move_chosen on the CPU, where the products may lack memory, and nothing is written before they
// are done.
#include "src/core/chosen_channels.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "src/ops/native_plan.h"
#include "src/ops/pass_operands.h"
#include "src/run/backend.h"
#include "src/steps/chosen_channels.h"

namespace fusedstep::ops {
namespace {

// Of a tensor: its matrices, their rows and columns, the chosen channels of a matrix, and whether these are
// rows.
constexpr size_t kNumbers = 5;

// Tensors without their operands, and the memory that their passes need.
struct Choice {
  std::vector<ChosenTensor> tensors;
  int64_t channels = 0, chosen = 0, partials = 0;

  explicit Choice(const std::vector<int64_t>& forms) {
    check(forms.size() % kNumbers == 0, "forms must be five numbers for each tensor");
    for (size_t i = 0; i < forms.size(); i += kNumbers) add(&forms[i]);
  }
  // In numbers of float64.
  int64_t memory() const {
    const size_t bytes = channels * (sizeof(float) + sizeof(int32_t)) + chosen * sizeof(int32_t);
    return partials + static_cast<int64_t>((bytes + sizeof(double) - 1) / sizeof(double));
  }
  ChoiceMemory in(const Tensor& memory, int device) const {
    const TensorView room = view(memory, "memory");
    check(room.dtype == DType::kDouble && room.device == device && is_in_order(room.sizes, room.strides) &&
              elements_of(room.sizes) >= this->memory(),
          "memory must be contiguous float64, as much as choice_memory says, on the device of the others");
    ChoiceMemory found{};
    found.partials = static_cast<double*>(room.data);
    found.norms = reinterpret_cast<float*>(found.partials + partials);
    found.positions = reinterpret_cast<int32_t*>(found.norms + channels);
    found.places = found.positions + channels;
    return found;
  }

 private:
  void add(const int64_t* form) {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    const bool by_rows = form[4] != 0;
    check(std::ranges::all_of(form, form + 4, [](int64_t x) { return x > 0 && x <= kMost; }) &&
              form[3] <= (by_rows ? form[1] : form[2]),
          "forms must be matrices, rows, columns, chosen channels and whether these are rows");
    ChosenTensor tensor{};
    tensor.matrices = static_cast<int32_t>(form[0]);
    tensor.rows = static_cast<int32_t>(form[1]);
    tensor.columns = static_cast<int32_t>(form[2]);
    tensor.chosen = static_cast<int32_t>(form[3]);
    tensor.channels = by_rows ? Channels::kRows : Channels::kColumns;
    tensor.first_channel = static_cast<uint32_t>(channels);
    tensor.first_chosen = static_cast<uint32_t>(chosen);
    tensor.first_partial = static_cast<uint32_t>(partials);
    channels += form[0] * channels_of(tensor);
    chosen += form[0] * form[3];
    partials += partials_of(tensor);
    check(std::max(channels, partials) <= std::numeric_limits<uint32_t>::max(),
          "there are too many channels");
    tensors.push_back(tensor);
  }
};

constexpr const char* kDoNotFit = "operands must have the elements that forms say";

void check_counts(const Choice& choice, const PassOperands& whole) {
  const auto elements = [](const ChosenTensor& tensor) { return elements_of(tensor); };
  check(std::ranges::equal(whole.counts(), choice.tensors, {}, {}, elements), kDoNotFit);
}

int64_t choice_memory(const std::vector<int64_t>& forms) { return Choice(forms).memory(); }

void bind_sums(Choice& choice, const PassOperands& sum, const PassOperands& grad) {
  grad.check_is_of(sum);
  check(grad.dtype() == sum.dtype(), "gradients and sums must have one dtype");
  check_counts(choice, sum);
  for (size_t i = 0; i < sum.counts().size(); ++i) {
    choice.tensors[i].stored = sum.data(i);
    choice.tensors[i].grad = grad.data(i);
  }
}

// Binds updates that lie one behind another in memory. Returns their dtype.
DType bind_updates(Choice& choice, const Tensor& updates, int device) {
  const TensorView memory = view(updates, "updates");
  check(memory.device == device && is_in_order(memory.sizes, memory.strides),
        "updates must be contiguous, on the device of the others");
  auto* at = static_cast<std::byte*>(memory.data);
  int64_t count = 0;
  for (ChosenTensor& tensor : choice.tensors) {
    tensor.product = at;
    at += chosen_elements_of(tensor) * element_size(memory.dtype);
    count += chosen_elements_of(tensor);
  }
  check(count == elements_of(memory.sizes), kDoNotFit);
  return memory.dtype;
}

// Both kinds of device: on the CPU the sums stay as they are.
void choose_into(const Tensors& sums, const Tensors& grads, const Tensor& updates, const Tensor& memory,
                 const std::vector<int64_t>& forms, double momentum, bool maximizes) {
  if (sums.empty()) return;
  const TensorView first = view(sums[0], "the sum");
  const PassOperands sum(sums, "the sum", first), grad(grads, "the gradient", first);
  Choice choice(forms);
  bind_sums(choice, sum, grad);
  const PassFormat format = format_of(sum.dtype(), bind_updates(choice, updates, first.device));
  const ChoiceMemory found = choice.in(memory, first.device);
  if (first.device == kHost) return choose_updates(format, choice.tensors, found, maximizes, num_threads());
  device_passes().choose(first.device, format, choice.tensors, found, {momentum, maximizes});
}

void chosen_updates_into(const Tensors& sums, const Tensors& grads, const Tensor& updates,
                         const Tensor& memory, const std::vector<int64_t>& forms, bool maximizes) {
  choose_into(sums, grads, updates, memory, forms, 1, maximizes);
}

// Binds the directions of a move, and its factors.
PassFormat bind_directions(Choice& choice, const PassOperands& weight, const PassOperands& direction,
                           const std::vector<double>& factors) {
  check(factors.size() == weight.counts().size(), "there must be a factor for each weight");
  check_counts(choice, weight);
  check(std::ranges::equal(direction.counts(), choice.tensors, {}, {}, chosen_elements_of), kDoNotFit);
  for (size_t i = 0; i < factors.size(); ++i) {
    choice.tensors[i].product = direction.data(i);
    choice.tensors[i].factor = factors[i];
  }
  return format_of(weight.dtype(), direction.dtype());
}

void move_chosen(const Tensors& weights, const Tensors& directions, const Tensor& memory,
                 const std::vector<int64_t>& forms, double keep, const std::vector<double>& factors) {
  if (weights.empty()) return;
  const TensorView first = view(weights[0], "the weight");
  const PassOperands weight(weights, "the weight", first), direction(directions, "the direction", first);
  Choice choice(forms);
  const PassFormat format = bind_directions(choice, weight, direction, factors);
  for (size_t i = 0; i < weights.size(); ++i) choice.tensors[i].stored = weight.data(i);
  device_passes().move_chosen(first.device, format, choice.tensors, choice.in(memory, first.device), keep);
}

void advance_and_move_chosen(const Tensors& sums, const Tensors& grads, const Tensors& weights,
                             const Tensors& directions, const Tensor& memory,
                             const std::vector<int64_t>& forms, double momentum, bool maximizes, double keep,
                             const std::vector<double>& factors) {
  if (weights.empty()) return;
  const TensorView first = view(weights[0], "the weight");
  const PassOperands weight(weights, "the weight", first), sum(sums, "the sum", first),
      grad(grads, "the gradient", first), direction(directions, "the direction", first);
  Choice choice(forms);
  bind_sums(choice, sum, grad);
  const PassFormat format = bind_directions(choice, weight, direction, factors);
  check(sum.dtype() == weight.dtype(), "weights and sums must have one dtype");
  check_range(weight.dtype(), std::array{momentum, keep});
  check_range(weight.dtype(), factors);
  std::vector<void*> moved;
  for (size_t i = 0; i < weights.size(); ++i) moved.push_back(weight.data(i));
  advance_chosen(format, choice.tensors, moved, choice.in(memory, first.device),
                 {{momentum, maximizes}, keep}, num_threads());
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def("choice_memory(int[] forms) -> int");
  m.def(
      "choose_into(Tensor(a!)[] sums, Tensor[] grads, Tensor(b!) updates, Tensor(c!) memory, int[] forms, "
      "float momentum, bool maximizes) -> ()");
  m.def(
      "chosen_updates_into(Tensor[] sums, Tensor[] grads, Tensor(a!) updates, Tensor(b!) memory, int[] "
      "forms, "
      "bool maximizes) -> ()");
  m.def(
      "advance_and_move_chosen(Tensor(a!)[] sums, Tensor[] grads, Tensor(b!)[] weights, Tensor[] directions, "
      "Tensor memory, int[] forms, float momentum, bool maximizes, float keep, float[] factors) -> ()");
  m.def(
      "move_chosen(Tensor(a!)[] weights, Tensor[] directions, Tensor memory, int[] forms, float keep, "
      "float[] "
      "factors) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CompositeExplicitAutograd, m) {
  m.impl("choice_memory", TORCH_BOX(&choice_memory));
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) {
  m.impl("chosen_updates_into", TORCH_BOX(&chosen_updates_into));
  m.impl("advance_and_move_chosen", TORCH_BOX(&advance_and_move_chosen));
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CUDA, m) {
  m.impl("choose_into", TORCH_BOX(&choose_into));
  m.impl("move_chosen", TORCH_BOX(&move_chosen));
}

}  // namespace
}  // namespace fusedstep::ops
