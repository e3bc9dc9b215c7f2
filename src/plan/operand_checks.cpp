#include "src/plan/operand_checks.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>
#include <optional>
#include <stdexcept>

#include "src/plan/code_maps.h"
#include "src/plan/overlap.h"
#include "src/run/session.h"

namespace fusedstep {
namespace {

// States have the weight's dtype, or float32 where the weight has 16 bits. The latter may have a master copy.
Format format_of(size_t i, DType weight, DType state, bool has_master) {
  static constexpr struct {
    DType weight, state;
    bool has_master;
    Format format;
  } kFormats[] = {{DType::kFloat, DType::kFloat, false, Format::kFloat},
                  {DType::kDouble, DType::kDouble, false, Format::kDouble},
                  {DType::kBFloat16, DType::kBFloat16, false, Format::kBFloat16},
                  {DType::kHalf, DType::kHalf, false, Format::kHalf},
                  {DType::kBFloat16, DType::kFloat, false, Format::kBFloat16Float},
                  {DType::kHalf, DType::kFloat, false, Format::kHalfFloat},
                  {DType::kBFloat16, DType::kFloat, true, Format::kBFloat16Master},
                  {DType::kHalf, DType::kFloat, true, Format::kHalfMaster}};
  for (const auto& known : kFormats) {
    if (known.weight == weight && known.state == state && known.has_master == has_master) return known.format;
  }
  if (has_master) {
    refuse(i, std::string("a master copy takes a weight of 16 bits with float32 states; the weight is ") +
                  name_of(weight) + ", a state " + name_of(state));
  }
  refuse(i, std::string("a state is ") + name_of(state) + " but the weight is " + name_of(weight));
}

std::string name_of_device(int device) {
  return device == kHost ? "the CPU" : "cuda:" + std::to_string(device);
}

void check_device(size_t i, const char* what, const TensorView& view, int device) {
  if (view.device == device) return;
  refuse(i, std::string(what) + " is on " + name_of_device(view.device) + " but the weight is on " +
                name_of_device(device));
}

// By the option that asks for it.
const char* name_of(WeightCode code) {
  switch (code) {
    case WeightCode::kPlain:
      return "itself";
    case WeightCode::kSplit:
      return "master_weights='split'";
    case WeightCode::kKahanBf16:
    case WeightCode::kKahanHalf:
      return "rounding='kahan'";
    case WeightCode::kRandom:
      return "rounding='stochastic'";
  }
  return "?";
}

std::string text(Dims sizes) {
  std::string out = "[";
  for (size_t d = 0; d < sizes.size(); ++d) out += (d ? ", " : "") + std::to_string(sizes[d]);
  return out + "]";
}

void check_grad(size_t i, const TensorView& weight, const TensorView& grad) {
  if (!std::ranges::equal(grad.sizes, weight.sizes)) {
    refuse(i, "the gradient's shape " + text(grad.sizes) + " is not the weight's, " + text(weight.sizes));
  }
  if (grad.dtype != weight.dtype) {
    refuse(i, std::string("the gradient is ") + name_of(grad.dtype) + " but the weight is " +
                  name_of(weight.dtype));
  }
  check_no_overlap(i, "the weight", weight.sizes, weight.strides);
}

void check_state(size_t i, const TensorView& weight, const TensorView& state) {
  if (!std::ranges::equal(state.sizes, weight.sizes)) {
    refuse(i, "a state's shape " + text(state.sizes) + " is not the weight's, " + text(weight.sizes));
  }
  check_no_overlap(i, "a state", state.sizes, state.strides);
}

// The numbers of a state of a weight with these sizes.
int64_t numbers_of(Dims sizes, Role role) {
  const size_t dims = sizes.size();
  switch (role) {
    case Role::kElement:
      break;
    case Role::kIndex:
      return dims == 0 ? 1 : sizes[0];
    case Role::kRow:
      return dims < 2 ? 0 : elements_of(sizes.first(dims - 1));
    case Role::kColumn:
      return dims < 2 ? elements_of(sizes) : elements_of(sizes.first(dims - 2)) * sizes[dims - 1];
  }
  return elements_of(sizes);
}

}  // namespace

void refuse(size_t i, const std::string& why) {
  throw std::runtime_error("tensor " + std::to_string(i) + " of the list: " + why);
}

void refuse_row(size_t i, int dim, int64_t at, int64_t size) {
  refuse(i, "the gradient's index " + std::to_string(at) + " is out of range: dimension " +
                std::to_string(dim) + " of the weight has size " + std::to_string(size));
}

void check_no_overlap(size_t i, const char* what, Dims sizes, Dims strides) {
  if (overlaps_itself(sizes, strides)) {
    refuse(i, std::string(what) + " overlaps itself in memory (an expanded tensor?); clone() it first");
  }
}

void check_none_shared(std::span<const Elements> weights) {
  std::vector<size_t> order;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i].begin != weights[i].end) order.push_back(i);
  }
  std::ranges::stable_sort(order, {}, [&](size_t i) { return weights[i].begin; });
  std::vector<Elements> sorted;
  for (const size_t i : order) sorted.push_back(weights[i]);
  if (const std::optional<size_t> sharing = find_sharing(sorted)) {
    refuse(order[*sharing], "the weight shares memory with another weight of the list");
  }
}

void check_devices(size_t i, const TensorOperands& operands, int slots, int device) {
  check_device(i, "the gradient", operands.grad, device);
  for (int k = 0; k < slots; ++k) check_device(i, "a state", operands.states[k], device);
}

Format checked_format(size_t i, const TensorOperands& operands, int slots, bool masters, WeightCode code) {
  const DType weight = operands.weight.dtype;
  check_grad(i, operands.weight, operands.grad);
  const bool has_value = code != WeightCode::kPlain;
  Format format = format_of(i, weight, has_value ? DType::kFloat : weight, has_value);
  if (has_value && operands.rows) {
    refuse(i, std::string("the gradient is sparse, but the weight's value is kept by ") + name_of(code) +
                  "; leave that out for its group");
  }
  // Codes take the place of float32, and so does what is kept beside a weight.
  const auto dtype_of = [&](int k) {
    const TensorView& state = operands.states[k];
    const bool is_beside = has_value && masters && k == slots - 1;
    return state.has_codes() || is_beside ? DType::kFloat : state.dtype;
  };
  for (int k = 0; k < slots; ++k) {
    const TensorView& state = operands.states[k];
    if (checked_storage(i, operands.weight, state) == Storage::kPlain) check_state(i, operands.weight, state);
    format = format_of(i, weight, dtype_of(k), masters || has_value);
    if (dtype_of(k) != dtype_of(0)) refuse(i, "its states have different dtypes");
    const bool is_master = masters && k == slots - 1;
    if (!is_master && state.has_codes() != operands.states[0].has_codes()) {
      refuse(i, "some of its states are in codes, others are not");
    }
    if (state.has_codes() && operands.rows) {
      refuse(i, "the gradient is sparse, but a state is quantised; leave state_dtype out for its group");
    }
  }
  return format;
}

void check_numbers(size_t i, const TensorView& weight, const TensorView& state, Role role) {
  check_device(i, "a state", state, weight.device);
  const DType dtype = weight.dtype == DType::kDouble ? DType::kDouble : DType::kFloat;
  const char* const what = role == Role::kColumn ? "columns" : "rows";
  if (state.dtype != dtype) {
    refuse(i, std::string("a state of ") + what + " is " + name_of(state.dtype) + " but has to be " +
                  name_of(dtype));
  }
  const int64_t count = numbers_of(weight.sizes, role);
  if (elements_of(state.sizes) != count || !is_in_order(state.sizes, state.strides)) {
    refuse(i,
           "a state must be contiguous, with a number for each of the " + std::to_string(count) + " " + what);
  }
}

WeightCode checked_weight_code(size_t i, const TensorOperands& operands, int slots, bool masters,
                               bool is_random) {
  const DType weight = operands.weight.dtype, last = slots > 0 ? operands.states[slots - 1].dtype : weight;
  const bool is_beside = masters && slots > 0;
  WeightCode code = WeightCode::kPlain;
  if (is_random) code = WeightCode::kRandom;
  if (is_beside && last == DType::kInt16) code = WeightCode::kSplit;
  if (is_beside && last == weight && weight == DType::kBFloat16) code = WeightCode::kKahanBf16;
  if (is_beside && last == weight && weight == DType::kHalf) code = WeightCode::kKahanHalf;
  if (code == WeightCode::kPlain) return code;
  const bool is_bf16_only = code == WeightCode::kSplit || code == WeightCode::kRandom;
  if (is_bf16_only && weight != DType::kBFloat16) {
    refuse(i, std::string(name_of(code)) + " takes bfloat16 weights, but one is " + name_of(weight));
  }
  return code;
}

Storage checked_storage(size_t i, const TensorView& weight, const TensorView& state) {
  if (!state.has_codes()) return Storage::kPlain;
  const int64_t elements = elements_of(weight.sizes);
  const bool is_whole = std::ranges::equal(state.sizes, weight.sizes);
  const bool is_float = state.dtype == DType::kFloat8;
  const Storage storage = is_float ? Storage::kFloat8 : is_whole ? Storage::kInt8 : Storage::kInt4;
  const CodeMap& map = code_map(storage, /*is_signed=*/true);
  const bool is_packed =
      std::ranges::equal(state.sizes, std::array{map.bytes_of(elements)}) ||
      std::ranges::equal(state.sizes, sizes_in_units(weight.sizes, map.elements_per_byte()));
  if (!is_whole && (is_float || !is_packed)) {
    refuse(i, "the codes of a state have the shape " + text(state.sizes) + ", which the weight's, " +
                  text(weight.sizes) + ", does not ask for");
  }
  if (!is_in_order(state.sizes, state.strides)) {
    refuse(i, "the codes of a state must be contiguous");
  }
  if (state.blocks != map.blocks_of(elements)) {
    refuse(i, "a state's absmax has " + std::to_string(state.blocks) + " numbers, its codes have " +
                  std::to_string(map.blocks_of(elements)) + " blocks");
  }
  return storage;
}

void check_rows(size_t i, const RowIndex& rows, Dims sizes, int threads) {
  const auto is_in = [&](int d, int64_t entry) {
    return static_cast<uint64_t>(rows.at(d, entry)) < static_cast<uint64_t>(sizes[d]);
  };
  for (int d = 0; d < rows.dims; ++d) {
    std::atomic<bool> all = true;
    run_ranges(threads, rows.entries, /*each=*/1, [&](int64_t begin, int64_t end) {
      bool all_here = true;
      for (int64_t entry = begin; entry < end; ++entry) all_here &= is_in(d, entry);
      if (!all_here) all = false;
    });
    if (all) continue;
    int64_t first = 0;
    while (is_in(d, first)) ++first;
    refuse_row(i, d, rows.at(d, first), sizes[d]);
  }
}

}  // namespace fusedstep
