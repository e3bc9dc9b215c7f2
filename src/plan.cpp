#include "src/plan.h"

#include <algorithm>
#include <stdexcept>

namespace fusedstep {
namespace {

[[noreturn]] void refuse(size_t i, const std::string& what) {
  throw std::runtime_error("tensor " + std::to_string(i) + " of the list: " + what);
}

const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat:
      return "float32";
    case DType::kDouble:
      return "float64";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kHalf:
      return "float16";
  }
  return "?";
}

cpu::Format format_of(size_t i, DType weight, DType state) {
  if (weight != state) {
    refuse(i, std::string("a state is ") + name(state) + " but the weight is " + name(weight));
  }
  switch (weight) {
    case DType::kFloat:
      return cpu::Format::kFloat;
    case DType::kDouble:
      return cpu::Format::kDouble;
    case DType::kBFloat16:
      return cpu::Format::kBFloat16;
    case DType::kHalf:
      return cpu::Format::kHalf;
  }
  return cpu::Format::kFloat;
}

std::string text(Dims sizes) {
  std::string out = "[";
  for (size_t d = 0; d < sizes.size(); ++d) out += (d ? ", " : "") + std::to_string(sizes[d]);
  return out + "]";
}

// Bytes from a tensor's first element to the end of its last.
int64_t span_bytes(const TensorView& view) {
  int64_t last = 0;
  for (size_t d = 0; d < view.sizes.size(); ++d) {
    if (view.sizes[d] == 0) return 0;
    last += (view.sizes[d] - 1) * view.strides[d];
  }
  return (last + 1) * element_size(view.dtype);
}

void check_grad(size_t i, const TensorView& weight, const TensorView& grad) {
  if (!std::ranges::equal(grad.sizes, weight.sizes)) {
    refuse(i, "the gradient's shape " + text(grad.sizes) + " is not the weight's, " + text(weight.sizes));
  }
  if (grad.dtype != weight.dtype) {
    refuse(i,
           std::string("the gradient is ") + name(grad.dtype) + " but the weight is " + name(weight.dtype));
  }
  if (overlaps_itself(weight.sizes, weight.strides)) {
    refuse(i, "the weight overlaps itself in memory (an expanded tensor?); clone() it first");
  }
}

void check_state(size_t i, const TensorView& weight, const TensorView& state) {
  if (!std::ranges::equal(state.sizes, weight.sizes)) {
    refuse(i, "a state's shape " + text(state.sizes) + " is not the weight's, " + text(weight.sizes));
  }
  if (overlaps_itself(state.sizes, state.strides)) {
    refuse(i, "a state overlaps itself in memory (an expanded tensor?); clone() it first");
  }
}

}  // namespace

int element_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat:
      return 4;
    case DType::kDouble:
      return 8;
    case DType::kBFloat16:
    case DType::kHalf:
      return 2;
  }
  return 0;
}

Plan::Plan(size_t tensors, int slots) : slots_(slots), entries_(tensors) {}

void Plan::bind(size_t i, const TensorOperands& operands) {
  Entry& entry = entries_[i];
  const TensorView* views[cpu::kMaxOperands] = {&operands.weight, &operands.grad};
  for (int k = 0; k < slots_; ++k) views[cpu::kFirstState + k] = &operands.states[k];
  const int count = cpu::kFirstState + slots_;

  std::vector<int64_t>& shape = scratch_;
  shape.clear();
  for (int k = 0; k < count; ++k) {
    shape.push_back(static_cast<int64_t>(views[k]->dtype));
    shape.push_back(static_cast<int64_t>(views[k]->sizes.size()));
    shape.insert(shape.end(), views[k]->sizes.begin(), views[k]->sizes.end());
    shape.insert(shape.end(), views[k]->strides.begin(), views[k]->strides.end());
  }
  if (entry.layout == nullptr || shape != entry.shape) {
    check_grad(i, operands.weight, operands.grad);
    cpu::Format format = format_of(i, operands.weight.dtype, operands.weight.dtype);
    for (int k = 0; k < slots_; ++k) {
      check_state(i, operands.weight, operands.states[k]);
      format = format_of(i, operands.weight.dtype, operands.states[k].dtype);
    }
    std::vector<Dims> strides;
    for (int k = 0; k < count; ++k) strides.push_back(views[k]->strides);
    entry.layout = std::make_unique<Layout>(operands.weight.sizes, strides);
    entry.format = format;
    entry.shape = shape;
    entry.weight_bytes = span_bytes(operands.weight);
    entry.grad_bytes = span_bytes(operands.grad);
    entry.grad_overlaps = overlaps_itself(operands.grad.sizes, operands.grad.strides);
    entry.task.operands = count;
    entry.task.layout = entry.layout->blocks();
    for (int k = 0; k < count; ++k) entry.task.element_size[k] = element_size(views[k]->dtype);
    stale_ = true;
    addresses_.clear();
  }
  for (int k = 0; k < count; ++k) entry.task.data[k] = views[k]->data;
}

void Plan::refresh(int64_t wave_bytes) {
  if (!stale_ && wave_bytes == wave_bytes_) return;
  wave_bytes_ = wave_bytes;
  chunks_.clear();
  waves_.clear();
  cost_.assign(1, 0);
  Wave wave{};
  int64_t bytes = 0;
  const auto close = [&](size_t last) {
    wave.last = last;
    wave.last_chunk = static_cast<int64_t>(chunks_.size());
    if (wave.last_chunk > wave.first_chunk) waves_.push_back(wave);
    wave = Wave{last, last, wave.last_chunk, wave.last_chunk};
    bytes = 0;
  };
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Layout& layout = *entries_[i].layout;
    int64_t tensor_bytes = 0;
    for (int k = 0; k < entries_[i].task.operands; ++k) {
      tensor_bytes += layout.units() * layout.elements_per_unit() * entries_[i].task.element_size[k];
    }
    if (bytes > 0 && bytes + tensor_bytes > wave_bytes) close(i);
    bytes += tensor_bytes;
    const int64_t per_chunk = std::max<int64_t>(1, cpu::kChunkElements / layout.elements_per_unit());
    for (int64_t begin = 0; begin < layout.units(); begin += per_chunk) {
      const int64_t end = std::min(begin + per_chunk, layout.units());
      chunks_.push_back({static_cast<uint32_t>(i), begin, end});
      cost_.push_back(cost_.back() + (end - begin) * layout.elements_per_unit());
    }
  }
  close(entries_.size());
  partial_norms.resize(2 * chunks_.size());
  stale_ = false;
}

void Plan::find_aliases() {
  // Addresses that did not change since the last time have the same answer.
  std::vector<std::array<const char*, 2>> now;
  now.reserve(entries_.size());
  for (const Entry& entry : entries_) {
    now.push_back({static_cast<const char*>(entry.task.data[cpu::kWeight]),
                   static_cast<const char*>(entry.task.data[cpu::kGrad])});
  }
  if (now == addresses_) return;
  addresses_ = std::move(now);

  struct Range {
    const char *begin, *end;
    Entry* grad_of;  // null: a weight
  };
  std::vector<Range> ranges;
  for (Entry& entry : entries_) {
    const auto* weight = static_cast<const char*>(entry.task.data[cpu::kWeight]);
    const auto* grad = static_cast<const char*>(entry.task.data[cpu::kGrad]);
    const bool precise = entry.format == cpu::Format::kFloat || entry.format == cpu::Format::kDouble;
    entry.grad_can_store = precise && !entry.grad_overlaps;
    if (entry.weight_bytes > 0) ranges.push_back({weight, weight + entry.weight_bytes, nullptr});
    if (entry.grad_bytes > 0) ranges.push_back({grad, grad + entry.grad_bytes, &entry});
  }
  std::ranges::sort(ranges, {}, &Range::begin);
  // A range that begins before the furthest end so far shares memory with the range that reaches there.
  const Range* furthest = nullptr;
  for (const Range& range : ranges) {
    if (furthest != nullptr && range.begin < furthest->end) {
      for (const Range* shared : {&range, furthest}) {
        if (shared->grad_of != nullptr) shared->grad_of->grad_can_store = false;
      }
    }
    if (furthest == nullptr || range.end > furthest->end) furthest = &range;
  }
}

}  // namespace fusedstep
