// new_states: zeroed states for a list of weights; on the CPU placed apart and first touched by the threads
// that will update them.
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

// How the states of a slot are stored. The name of a storage is "weight" for numbers of the weight's dtype,
// "float32", "int16" for the lower bits of weights, or "int8", "int4" or "fp8" for codes: after "unsigned "
// if the states are never negative.
struct Slot {
  std::string_view storage;  // without "unsigned "
  bool is_signed;
  const CodeMap* map;  // null for numbers
};

std::vector<Slot> slots_of(const std::vector<std::string>& storage) {
  constexpr std::string_view kUnsigned = "unsigned ";
  check(storage.size() <= kMaxStates, "a weight has at most " + std::to_string(kMaxStates) + " states");
  std::vector<Slot> slots;
  for (std::string_view each : storage) {
    const bool is_signed = !each.starts_with(kUnsigned);
    if (!is_signed) each.remove_prefix(kUnsigned.size());
    const bool has_numbers = each == "weight" || each == "float32" || each == "int16";
    slots.push_back({each, is_signed, has_numbers ? nullptr : &code_map(storage_of(each), is_signed)});
  }
  return slots;
}

// Calls work(first, last) for slots [first, last) of one storage, which a step reads side by side.
template <class Work>
void for_runs(const std::vector<Slot>& slots, Work work) {
  for (size_t first = 0, last = 0; first < slots.size(); first = last) {
    while (last < slots.size() && slots[last].storage == slots[first].storage) ++last;
    work(first, last);
  }
}

// A tensor of a state: numbers, codes or their absmax.
struct Part {
  int32_t dtype;
  std::vector<int64_t> sizes, strides;

  int64_t element_size() const { return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)); }
  int64_t bytes() const { return elements_of(sizes) * element_size(); }
};

// The tensors of a weight's state: numbers in the weight's layout, or codes and their absmax.
std::vector<Part> parts_of(const Slot& slot, const Tensor& weight) {
  const TensorView layout = view(weight, "weight");
  if (slot.map != nullptr) {
    const CodesShape codes = codes_shape(slot.map->storage, layout.sizes);
    return {{codes.dtype, codes.sizes, strides_in_order(codes.sizes)},
            {aoti_torch_dtype_float32(), codes.absmax, strides_in_order(codes.absmax)}};
  }
  int32_t dtype = slot.storage == "int16" ? aoti_torch_dtype_int16() : aoti_torch_dtype_float32();
  if (slot.storage == "weight") TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(weight.get(), &dtype));
  return {{dtype, {layout.sizes.begin(), layout.sizes.end()}, dense_strides(layout)}};
}

// A tensor beside a weight, without values, in place `at` of `count` that a step reads side by side. Nothing
// if torch has no memory for it.
std::optional<Tensor> new_tensor(const Part& part, const TensorView& weight, size_t at, size_t count) {
  const bool on_host = weight.device == kHost, placed = on_host && part.bytes() >= kPlacedBytes;
  const int32_t device_type = on_host ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();

  const int64_t size = part.element_size(), unit_stride = 1;
  const int64_t buffer_elements = elements_of(part.sizes) + (placed ? kPage / size : 0);
  AtenTensorHandle buffer_handle = nullptr, state_handle = nullptr;
  if (aoti_torch_empty_strided(1, &buffer_elements, &unit_stride, part.dtype, device_type,
                               on_host ? 0 : weight.device, &buffer_handle) != AOTI_TORCH_SUCCESS) {
    return {};
  }
  const Tensor buffer(buffer_handle);
  int64_t offset = 0;
  if (placed) {
    ask_for_huge_pages(buffer.data_ptr(), buffer_elements * size);
    offset = placement_offset(buffer.data_ptr(), weight.data, static_cast<int>(at), static_cast<int>(count));
  }
  if (aoti_torch__reinterpret_tensor(buffer.get(), static_cast<int64_t>(part.sizes.size()), part.sizes.data(),
                                     part.strides.data(), offset / size,
                                     &state_handle) != AOTI_TORCH_SUCCESS) {
    return {};
  }
  return Tensor(state_handle);
}

[[noreturn]] void refuse_for_memory(const Tensors& weights, const std::vector<Slot>& slots) {
  int64_t bytes = 0;
  for (const Tensor& weight : weights) {
    for (const Slot& slot : slots) {
      for (const Part& part : parts_of(slot, weight)) bytes += part.bytes();
    }
  }
  throw NoMemory("there is no memory for the states of the optimizer: " + std::to_string(bytes) +
                 " bytes, of " + std::to_string(weights.size()) + " weights with " +
                 std::to_string(slots.size()) + " states each");
}

// The states slot by slot, then the absmax of each that is in codes; without values.
Tensors empty_states(const Tensors& weights, const std::vector<Slot>& slots) {
  Tensors states, absmax;
  states.reserve(slots.size() * weights.size());
  for_runs(slots, [&](size_t first, size_t last) {
    for (size_t k = first; k < last; ++k) {
      for (const Tensor& weight : weights) {
        const TensorView layout = view(weight, "weight");
        Tensors* list = &states;
        for (const Part& part : parts_of(slots[k], weight)) {
          std::optional<Tensor> made = new_tensor(part, layout, k - first, last - first);
          if (!made) refuse_for_memory(weights, slots);
          std::exchange(list, &absmax)->push_back(std::move(*made));
        }
      }
    }
  });
  states.insert(states.end(), absmax.begin(), absmax.end());
  return states;
}

Tensors new_states(const Tensors& weights, const std::vector<std::string>& storage) {
  const std::vector<Slot> slots = slots_of(storage);
  Tensors states = empty_states(weights, slots);
  const size_t count = weights.size();
  std::vector<TensorView> found = state_views(states, slots.size() * count);
  for (TensorView& each : found) {
    if (each.dtype == DType::kInt16) each.dtype = DType::kBFloat16;  // a dtype of weights, of as many bytes
  }
  for_runs(slots, [&](size_t first, size_t last) {
    Plan plan(count, static_cast<int>(last - first));
    uint32_t not_negative = 0;
    for (size_t k = first; k < last; ++k) not_negative |= uint32_t{!slots[k].is_signed} << (k - first);
    plan.use_signs(not_negative);
    for (size_t i = 0; i < count; ++i) {
      // A dense stand-in for the weight, with the chunks of a step; the states alone are touched.
      const Dims sizes = view(weights[i], "weight").sizes;
      const std::vector<int64_t> in_order = strides_in_order(sizes);
      TensorView weight = found[first * count + i];
      if (weight.has_codes()) weight = {nullptr, DType::kFloat, sizes, in_order};
      TensorOperands operands{weight, weight, {}};
      for (size_t k = first; k < last; ++k) operands.states[k - first] = found[k * count + i];
      plan.bind(i, operands);
    }
    zero_states(plan, num_threads());
  });
  return states;
}

Tensors new_device_states(const Tensors& weights, const std::vector<std::string>& storage) {
  const std::vector<Slot> slots = slots_of(storage);
  Tensors states = empty_states(weights, slots);
  for (size_t i = 0; i < states.size(); ++i) {
    const size_t slot = i / weights.size();
    const CodeMap* const map = slot < slots.size() ? slots[slot].map : nullptr;
    // Codes of zero: of fp8 it is a number.
    torch::stable::fill_(states[i], map == nullptr || map->storage == Storage::kFloat8 ? 0 : zero_byte(*map));
  }
  return states;
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def("new_states(Tensor[] weights, str[] storage) -> Tensor[]");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) { m.impl("new_states", TORCH_BOX(&new_states)); }
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CUDA, m) { m.impl("new_states", TORCH_BOX(&new_device_states)); }

}  // namespace
}  // namespace fusedstep::ops
