// new_states and new_codes: zeroed states for a list of weights; on the CPU placed apart and first touched by
// the threads that will update them.
#include <algorithm>
#include <new>
#include <numeric>
#include <string>
#include <utility>

#include "src/ops/native_plan.h"
#include "src/plan/code_maps.h"
#include "src/plan/placement.h"

namespace fusedstep::ops {
namespace {

// Exception with a text that Python makes a MemoryError of.
class NoMemory : public std::bad_alloc {
 public:
  explicit NoMemory(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// The strides of a dense tensor whose dimensions lie in memory in the order of the weight's.
std::vector<int64_t> dense_strides(const TensorView& weight) {
  std::vector<size_t> order(weight.sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return weight.strides[a] > weight.strides[b]; });
  std::vector<int64_t> strides(order.size());
  int64_t stride = 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    strides[*dim] = stride;
    stride *= std::max<int64_t>(weight.sizes[*dim], 1);
  }
  return strides;
}

// Nothing if torch has no memory for it.
std::optional<Tensor> new_state(const TensorView& layout, const std::vector<int64_t>& strides, int32_t dtype,
                                int slot, int slots) {
  const auto size = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  const int64_t elements = elements_of(layout.sizes);
  const bool on_host = layout.device == kHost, placed = on_host && elements * size >= kPlacedBytes;
  const int32_t device_type = on_host ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();

  const int64_t buffer_elements = elements + (placed ? kPage / size : 0), unit_stride = 1;
  AtenTensorHandle buffer_handle = nullptr, state_handle = nullptr;
  if (aoti_torch_empty_strided(1, &buffer_elements, &unit_stride, dtype, device_type,
                               on_host ? 0 : layout.device, &buffer_handle) != AOTI_TORCH_SUCCESS) {
    return {};
  }
  const Tensor buffer(buffer_handle);
  int64_t offset = 0;
  if (placed) {
    ask_for_huge_pages(buffer.data_ptr(), buffer_elements * size);
    offset = placement_offset(buffer.data_ptr(), layout.data, slot, slots) / size;
  }
  if (aoti_torch__reinterpret_tensor(buffer.get(), static_cast<int64_t>(layout.sizes.size()),
                                     layout.sizes.data(), strides.data(), offset,
                                     &state_handle) != AOTI_TORCH_SUCCESS) {
    return {};
  }
  return Tensor(state_handle);
}

// The dtype of a weight's states: the weight's, or if they are `wide` float32 where the weight has 16 bits.
int32_t dtype_of_states(const Tensor& weight, const TensorView& layout, bool wide) {
  int32_t dtype = aoti_torch_dtype_float32();
  if (!wide || element_size(layout.dtype) > 2) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(weight.get(), &dtype));
  }
  return dtype;
}

[[noreturn]] void refuse_for_memory(const Tensors& weights, int64_t slots, bool wide) {
  int64_t bytes = 0;
  for (const Tensor& weight : weights) {
    const TensorView layout = view(weight, "weight");
    const size_t size = aoti_torch_dtype_element_size(dtype_of_states(weight, layout, wide));
    bytes += slots * elements_of(layout.sizes) * static_cast<int64_t>(size);
  }
  throw NoMemory("there is no memory for the states of the optimizer: " + std::to_string(bytes) +
                 " bytes, of " + std::to_string(weights.size()) + " weights with " + std::to_string(slots) +
                 " states each");
}

Tensors empty_states(const Tensors& weights, int64_t slots, bool wide) {
  check(slots >= 0 && slots <= kMaxStates,
        "slots must be from 0 to " + std::to_string(kMaxStates) + ", not " + std::to_string(slots));
  Tensors states;
  states.reserve(slots * weights.size());
  for (int slot = 0; slot < slots; ++slot) {
    for (const Tensor& weight : weights) {
      const TensorView layout = view(weight, "weight");
      const int32_t dtype = dtype_of_states(weight, layout, wide);
      std::optional<Tensor> state =
          new_state(layout, dense_strides(layout), dtype, slot, static_cast<int>(slots));
      if (!state) refuse_for_memory(weights, slots, wide);
      states.push_back(std::move(*state));
    }
  }
  return states;
}

Tensors new_states(const Tensors& weights, int64_t slots, bool wide) {
  Tensors states = empty_states(weights, slots, wide);
  if (states.empty()) return states;
  // The weight's dense stand-in is its first state: a plan over dense operands, with the chunks of a step.
  Plan plan(weights.size(), static_cast<int>(slots));
  for (size_t i = 0; i < weights.size(); ++i) {
    TensorOperands operands{view(states[i], "state"), view(states[i], "state"), {}};
    for (int64_t k = 0; k < slots; ++k) operands.states[k] = view(states[k * weights.size() + i], "state");
    plan.bind(i, operands);
  }
  zero_states(plan, num_threads());
  return states;
}

Tensors new_device_states(const Tensors& weights, int64_t slots, bool wide) {
  Tensors states = empty_states(weights, slots, wide);
  for (Tensor& state : states) torch::stable::zero_(state);
  return states;
}

// The codes of each slot and weight, then the absmax of each, without values.
Tensors empty_codes(const Tensors& weights, Storage storage, size_t slots) {
  Tensors codes, absmax;
  for (size_t slot = 0; slot < slots; ++slot) {
    for (const Tensor& weight : weights) {
      const TensorView layout = view(weight, "weight");
      const CodesShape wanted = codes_shape(storage, layout.sizes);
      const auto new_tensor = [&](Dims sizes, int32_t of_dtype) {
        const TensorView shape{layout.data, layout.dtype, sizes, {}, layout.device};
        std::optional<Tensor> made = new_state(shape, strides_in_order(sizes), of_dtype,
                                               static_cast<int>(slot), static_cast<int>(slots));
        if (!made) {
          throw NoMemory("there is no memory for the states of the optimizer: " +
                         std::to_string(elements_of(wanted.sizes)) + " bytes of one of " +
                         std::to_string(slots * weights.size()));
        }
        return std::move(*made);
      };
      codes.push_back(new_tensor(wanted.sizes, wanted.dtype));
      absmax.push_back(new_tensor(wanted.absmax, aoti_torch_dtype_float32()));
    }
  }
  codes.insert(codes.end(), absmax.begin(), absmax.end());
  return codes;
}

Tensors new_codes(const Tensors& weights, std::string_view storage_name, const std::vector<bool>& is_signed) {
  const Storage storage = storage_of(storage_name);
  const size_t slots = is_signed.size(), count = weights.size();
  check(slots <= kMaxStates, "a weight has at most " + std::to_string(kMaxStates) + " states");
  Tensors states = empty_codes(weights, storage, slots);
  if (states.empty()) return states;
  Plan plan(count, static_cast<int>(slots));
  uint32_t not_negative = 0;
  for (size_t k = 0; k < slots; ++k) not_negative |= uint32_t{!is_signed[k]} << k;
  plan.use_signs(not_negative);
  const std::vector<TensorView> found = state_views(states, slots * count);
  for (size_t i = 0; i < count; ++i) {
    // Only the states are touched: the weight's stand-in has no memory.
    const Dims sizes = view(weights[i], "weight").sizes;
    const std::vector<int64_t> strides = strides_in_order(sizes);
    const TensorView weight{nullptr, DType::kFloat, sizes, strides};
    TensorOperands operands{weight, weight, {}};
    for (size_t k = 0; k < slots; ++k) operands.states[k] = found[k * count + i];
    plan.bind(i, operands);
  }
  zero_states(plan, num_threads());
  return states;
}

Tensors new_device_codes(const Tensors& weights, std::string_view storage_name,
                         const std::vector<bool>& is_signed) {
  const Storage storage = storage_of(storage_name);
  Tensors states = empty_codes(weights, storage, is_signed.size());
  for (size_t i = 0; i < states.size(); ++i) {
    const size_t slot = i / weights.size();
    const CodeMap* const map = slot < is_signed.size() ? &code_map(storage, is_signed[slot]) : nullptr;
    // Codes of zero: of fp8 it is a number.
    torch::stable::fill_(states[i], map == nullptr || storage == Storage::kFloat8 ? 0.0 : zero_byte(*map));
  }
  return states;
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def("new_codes(Tensor[] weights, str storage, bool[] signed) -> Tensor[]");
  m.def("new_states(Tensor[] weights, int slots, bool wide=False) -> Tensor[]");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) {
  m.impl("new_codes", TORCH_BOX(&new_codes));
  m.impl("new_states", TORCH_BOX(&new_states));
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CUDA, m) {
  m.impl("new_codes", TORCH_BOX(&new_device_codes));
  m.impl("new_states", TORCH_BOX(&new_device_states));
}

}  // namespace
}  // namespace fusedstep::ops
