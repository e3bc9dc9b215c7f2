// Numbers to the codes of a state, and back: for states that come from elsewhere, or go there.
#include <numeric>
#include <string_view>
#include <tuple>
#include <vector>

#include "src/ops/native_plan.h"
#include "src/plan/code_maps.h"
#include "src/plan/operand_checks.h"
#include "src/run/dispatch.h"

namespace fusedstep::ops {
namespace {

// Blocks that a thread takes together.
constexpr int64_t kBlocks = 16;

template <class Work>
void for_blocks(const CodeMap& map, int64_t elements, Work work) {
  const int64_t each = kBlocks * map.block;
  run_ranges(num_threads(), (elements + each - 1) / each, each, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * each; at < std::min(end * each, elements); at += each) {
      work(at, std::min(each, elements - at));
    }
  });
}

Tensor new_tensor(Dims sizes, int32_t dtype) {
  const std::vector<int64_t> strides = strides_in_order(sizes);
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), dtype, aoti_torch_device_type_cpu(), 0,
                                                  &handle));
  return Tensor(handle);
}

// The number of a storage, which encode_state() takes in place of its name: rules.h says why.
int64_t storage_index(std::string_view name) { return static_cast<int64_t>(storage_of(name)); }

// As step number `step` of a rule that rounds by it does; 0: to the nearest codes.
std::tuple<Tensor, Tensor> encode_state(const Tensor& values, int64_t storage_index, bool is_signed,
                                        int64_t step) {
  check(storage_index > 0 && storage_index <= static_cast<int64_t>(Storage::kFloat8),
        "there is no storage of codes of this number");
  const auto storage = static_cast<Storage>(storage_index);
  check(step >= 0, "step must not be negative");
  const CodeMap& map = step > 0 ? step_map(storage, is_signed) : code_map(storage, is_signed);
  const float rounding = step > 0 ? rounding_of_step(static_cast<double>(step)) : CodeMap::kToNearest;
  const TensorView from = view(values, "values");
  check(from.dtype == DType::kFloat && values.is_contiguous(), "values must be float32 and contiguous");
  const CodesShape shape = codes_shape(storage, from.sizes);
  Tensor codes = new_tensor(shape.sizes, shape.dtype);
  Tensor absmax = new_tensor(shape.absmax, aoti_torch_dtype_float32());
  const CodedState state{&map, static_cast<float*>(absmax.data_ptr())};
  for_blocks(map, elements_of(from.sizes), [&](int64_t begin, int64_t count) {
    kernels().encode(state, rounding, static_cast<const float*>(from.data) + begin, begin, count,
                     codes.data_ptr());
  });
  return {codes, absmax};
}

Tensor decode_state(const Tensor& codes, const Tensor& absmax, const std::vector<int64_t>& shape,
                    bool is_signed) {
  const std::vector<int64_t> strides = strides_in_order(shape);
  const TensorView weight{nullptr, DType::kFloat, shape, strides};
  const TensorView from = state_views({codes, absmax}, 1)[0];
  check(from.has_codes(), "codes must be uint8 or float8_e4m3fn");
  const CodeMap& map = code_map(checked_storage(0, weight, from), is_signed);
  Tensor values = new_tensor(shape, aoti_torch_dtype_float32());
  const CodedState state{&map, from.absmax};
  auto* const to = static_cast<float*>(values.data_ptr());
  for_blocks(map, elements_of(shape), [&](int64_t begin, int64_t count) {
    kernels().decode(state, from.data, begin, count, to + begin);
  });
  return values;
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def("storage_index(str name) -> int");
  m.def("encode_state(Tensor values, int storage, bool signed, int step=0) -> (Tensor, Tensor)");
  m.def("decode_state(Tensor codes, Tensor absmax, int[] shape, bool signed) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) {
  m.impl("encode_state", TORCH_BOX(&encode_state));
  m.impl("decode_state", TORCH_BOX(&decode_state));
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CompositeExplicitAutograd, m) {
  m.impl("storage_index", TORCH_BOX(&storage_index));
}

}  // namespace
}  // namespace fusedstep::ops
