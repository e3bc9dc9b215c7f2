#include "src/plan.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "src/core/reduction.h"

namespace fusedstep {
namespace {

// Bytes of operands of which a socket's caches keep a part from one step to the next.
constexpr int64_t kCached = int64_t{256} << 20;

// How far ahead is asked for what lies in memory, what a socket's third-level cache may hold, and what the
// team's second-level caches do: by whose processor it is, since they differ in how far they look ahead by
// themselves. docs/tried.md has other distances.
struct Distances {
  PrefetchDistance in_memory, in_third_level, in_second_level;

  const PrefetchDistance& of(int64_t bytes, int64_t second_level) const {
    if (bytes <= second_level) return in_second_level;
    return bytes <= kCached ? in_third_level : in_memory;
  }
};

#if defined(__x86_64__)
// As AMD counts its families: 0x19 is that of Zen 4, 0x1a that of Zen 5.
unsigned processor_family() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);
  return (eax >> 8 & 0xf) + (eax >> 20 & 0xff);
}
#endif

Distances known_distances() {
#if defined(__x86_64__)
  if (__builtin_cpu_is("amd")) {
    if (processor_family() >= 0x1a) {
      return {.in_memory = {.first = 2048}, .in_third_level = {.first = 4096}, .in_second_level = {}};
    }
    constexpr PrefetchDistance kBeyond{.first = 256, .second = 1024};
    return {.in_memory = kBeyond, .in_third_level = kBeyond, .in_second_level = {}};
  }
#endif
  constexpr PrefetchDistance kBeyond{.first = 1024, .second = 6144};
  return {.in_memory = kBeyond, .in_third_level = kBeyond, .in_second_level = {.first = 512}};
}

const Distances& distances() {
  static const Distances known = known_distances();
  return known;
}

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

// States have the weight's dtype, or float32 where the weight has 16 bits; these with a master copy or
// without.
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
                  name(weight) + ", a state " + name(state));
  }
  refuse(i, std::string("a state is ") + name(state) + " but the weight is " + name(weight));
}

// The bytes that a tensor's elements have been seen at.
class SeenBytes {
 public:
  SeenBytes(const char* begin, const char* end) : begin_(begin), end_(end) {}

  // Adds a tensor's elements; false if one of them has been seen before. Others of them may lie elsewhere.
  bool add(const char* data, int element_size, Dims sizes, Dims strides) {
    return walk(data, element_size, sizes, strides, true);
  }
  // Whether none of a tensor's elements has been seen.
  bool has_none(const char* data, int element_size, Dims sizes, Dims strides) {
    return walk(data, element_size, sizes, strides, false);
  }

 private:
  bool walk(const char* data, int element_size, Dims sizes, Dims strides, bool adds) {
    seen_.resize(end_ - begin_);
    std::vector<int64_t> index(sizes.size(), 0);
    for (int64_t offset = data - begin_;;) {
      for (int64_t at = offset; at < offset + element_size; ++at) {
        if (at < 0 || at >= end_ - begin_) continue;
        if (seen_[at]) return false;
        if (adds) seen_[at] = true;
      }
      size_t dim = sizes.size();
      for (; dim > 0; --dim) {
        offset += strides[dim - 1] * element_size;
        if (++index[dim - 1] < sizes[dim - 1]) break;
        offset -= sizes[dim - 1] * strides[dim - 1] * element_size;
        index[dim - 1] = 0;
      }
      if (dim == 0) return true;
    }
  }

  const char *begin_, *end_;
  std::vector<bool> seen_;
};

std::string name_of_device(int device) {
  return device == kHost ? "the CPU" : "cuda:" + std::to_string(device);
}

void check_device(size_t i, const char* what, const TensorView& view, int device) {
  if (view.device == device) return;
  refuse(i, std::string(what) + " is on " + name_of_device(view.device) + " but the weight is on " +
                name_of_device(device));
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

// Dtypes, sizes and strides of a tensor's operands, one behind another.
std::vector<int64_t> shape_of(std::span<const TensorView* const> views) {
  std::vector<int64_t> shape;
  for (const TensorView* view : views) {
    shape.push_back(static_cast<int64_t>(view->dtype));
    shape.push_back(static_cast<int64_t>(view->sizes.size()));
    shape.insert(shape.end(), view->sizes.begin(), view->sizes.end());
    shape.insert(shape.end(), view->strides.begin(), view->strides.end());
  }
  return shape;
}

// Whether shape_of(views) would be `shape`. Asked for every tensor at every step, nearly always to be told
// so.
bool is_shape_of(const std::vector<int64_t>& shape, std::span<const TensorView* const> views) {
  const int64_t* known = shape.data();
  for (const TensorView* view : views) {
    const auto dims = static_cast<int64_t>(view->sizes.size());
    if (known[0] != static_cast<int64_t>(view->dtype) || known[1] != dims) return false;
    known += 2;
    if (!std::equal(view->sizes.begin(), view->sizes.end(), known)) return false;
    if (!std::equal(view->strides.begin(), view->strides.end(), known + dims)) return false;
    known += 2 * dims;
  }
  return true;
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

[[noreturn]] void refuse_row(size_t i, int dim, int64_t at, int64_t size) {
  refuse(i, "the gradient's index " + std::to_string(at) + " is out of range: dimension " +
                std::to_string(dim) + " of the weight has size " + std::to_string(size));
}

void check_rows(size_t i, const RowIndex& rows, Dims sizes) {
  for (int d = 0; d < rows.dims; ++d) {
    for (int64_t entry = 0; entry < rows.entries; ++entry) {
      const int64_t at = rows.at(d, entry);
      if (at < 0 || at >= sizes[d]) refuse_row(i, d, at, sizes[d]);
    }
  }
}

// Throws unless the operands can be updated together.
Format checked_format(size_t i, const TensorOperands& operands, int slots, bool masters) {
  check_grad(i, operands.weight, operands.grad);
  Format format = format_of(i, operands.weight.dtype, operands.weight.dtype, false);
  for (int k = 0; k < slots; ++k) {
    check_state(i, operands.weight, operands.states[k]);
    format = format_of(i, operands.weight.dtype, operands.states[k].dtype, masters);
    if (operands.states[k].dtype != operands.states[0].dtype) refuse(i, "its states have different dtypes");
  }
  return format;
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

Plan::Plan(size_t tensors, int slots, int device, bool masters)
    : slots_(slots), device_(device), masters_(masters), entries_(tensors), formats_(tensors) {}

void Plan::bind(size_t i, const TensorOperands& operands) {
  Entry& entry = entries_[i];
  const TensorView* views[kMaxOperands] = {&operands.weight, &operands.grad};
  for (int k = 0; k < slots_; ++k) views[kFirstState + k] = &operands.states[k];
  const int count = kFirstState + slots_;
  check_device(i, "the gradient", operands.grad, device_);
  for (int k = 0; k < slots_; ++k) check_device(i, "a state", operands.states[k], device_);

  const bool changed = entry.layout == nullptr || entry.index.has_value() != operands.rows.has_value() ||
                       (entry.index && entry.index->dims != operands.rows->dims) ||
                       !is_shape_of(entry.shape, {views, views + count});
  const Format format = changed ? checked_format(i, operands, slots_, masters_) : formats_[i];
  if (operands.rows && device_ == kHost) check_rows(i, *operands.rows, operands.weight.sizes);
  if (changed) {
    const int indexed_dims = operands.rows ? operands.rows->dims : 0;
    std::vector<Dims> strides;
    for (int k = 0; k < count; ++k) strides.push_back(views[k]->strides.subspan(indexed_dims));
    // All that takes memory comes first: where there is none, nothing has changed.
    auto layout = std::make_unique<Layout>(operands.weight.sizes.subspan(indexed_dims), strides);
    std::vector<int64_t> shape = shape_of({views, views + count});
    entry.grad_overlaps = overlaps_itself(operands.grad.sizes, operands.grad.strides);
    entry.layout = std::move(layout);
    formats_[i] = format;
    entry.shape = std::move(shape);
    entry.weight_bytes = span_bytes(operands.weight);
    entry.grad_bytes = span_bytes(operands.grad);
    entry.task.operands = count;
    entry.task.layout = entry.layout->blocks();
    for (int k = 0; k < count; ++k) entry.task.element_size[k] = element_size(views[k]->dtype);
    stale_ = weights_moved_ = true;
    ++operands_version_;
    ++grads_version_;
    shared_with_.clear();
  }
  if (entry.task.data[kWeight] != operands.weight.data) weights_moved_ = true;
  if (entry.task.data[kWeight] != operands.weight.data || entry.task.data[kGrad] != operands.grad.data) {
    shared_with_.clear();
  }
  for (int k = 0; k < count; ++k) {
    if (entry.task.data[k] == views[k]->data) continue;
    entry.task.data[k] = views[k]->data;
    ++(k == kGrad ? grads_version_ : operands_version_);
  }
  if (operands.rows) {
    bind_rows(entry, operands, *operands.rows);
  } else {
    entry.index.reset();
    entry.rows.reset();
  }
}

void Plan::move_grad(size_t i, void* data) {
  entries_[i].task.data[kGrad] = data;
  ++grads_version_;
  shared_with_.clear();
}

void Plan::bind_rows(Entry& entry, const TensorOperands& operands, const RowIndex& index) {
  const int64_t units = entry.units();
  const bool was_stale = std::exchange(stale_, true);  // and stays so if there is no memory for the rows
  entry.index = index;
  ++grads_version_;
  if (device_ == kHost) {
    Rows& rows = entry.rows ? *entry.rows : entry.rows.emplace();
    std::vector<Dims> strides{operands.weight.strides, operands.grad.strides};
    for (int k = 0; k < slots_; ++k) strides.push_back(operands.states[k].strides);
    rows.assign(index, operands.weight.sizes, strides, operands.grad.data, element_size(operands.grad.dtype));
  }
  stale_ = was_stale || entry.units() != units;
  entry.grad_bytes = index.entries * span_bytes(operands.grad);
  shared_with_.clear();
}

void Plan::refresh(int64_t wave_bytes) {
  if (!stale_ && wave_bytes == wave_bytes_) return;
  stale_ = true;
  wave_bytes_ = wave_bytes;
  chunks_.clear();
  first_chunks_.clear();
  waves_.clear();
  for (std::vector<int64_t>* cost : {&cost_, &wave_cost_, &single_cost_}) cost->assign(1, 0);
  int64_t bytes = 0, all_bytes = 0;  // of the last wave, and of all operands
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Layout& layout = *entries_[i].layout;
    const int64_t units = entries_[i].units();
    const auto first = static_cast<int64_t>(chunks_.size());
    first_chunks_.push_back(first);
    const int64_t per_chunk = std::max<int64_t>(1, kChunkElements / layout.elements_per_unit());
    const bool is_single = units <= per_chunk;
    for (int64_t begin = 0; begin < units; begin += per_chunk) {
      const int64_t end = std::min(begin + per_chunk, units);
      chunks_.push_back({static_cast<uint32_t>(i), begin, end});
      const int64_t elements = (end - begin) * layout.elements_per_unit();
      cost_.push_back(cost_.back() + elements);
      wave_cost_.push_back(wave_cost_.back() + (is_single ? 0 : elements));
      single_cost_.push_back(single_cost_.back() + (is_single ? elements : 0));
    }
    int64_t tensor_bytes = 0;
    for (int k = 0; k < entries_[i].task.operands; ++k) {
      tensor_bytes += units * layout.elements_per_unit() * entries_[i].task.element_size[k];
    }
    all_bytes += tensor_bytes;
    if (is_single) continue;
    if (waves_.empty() || bytes + tensor_bytes > wave_bytes) {
      waves_.push_back({first, first});
      bytes = 0;
    }
    bytes += tensor_bytes;
    waves_.back().last = static_cast<int64_t>(chunks_.size());
  }
  first_chunks_.push_back(static_cast<int64_t>(chunks_.size()));
  partial_norms.resize(2 * chunks_.size());
  ratios.resize(entries_.size());
  step_balance.may_steal = norm_balance.may_steal = all_bytes > kCached;
  const PrefetchDistance& ahead = distances().of(all_bytes, wave_bytes);
  for (Entry& entry : entries_) entry.task.ahead = ahead;
  stale_ = false;
  ++operands_version_;
}

int64_t Plan::elements_of_row(size_t i) const {
  int64_t elements = 1;
  for (const int64_t size : entries_[i].sizes(kWeight).subspan(row_index(i)->dims)) elements *= size;
  return elements;
}

void Plan::refuse_row(size_t i, int dim, int64_t at) const {
  fusedstep::refuse_row(i, dim, at, row_sizes(i)[dim]);
}

bool Plan::grad_can_store(size_t i) const {
  const Entry& entry = entries_[i];
  const bool precise = formats_[i] == Format::kFloat || formats_[i] == Format::kDouble;
  return entry.grad_is_writable && precise;
}

void Plan::check_weights_apart() {
  if (weights_moved_) note_weights();
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].grad_bytes > 0 && !grad_is_apart(i, entries_[i].address(kGrad))) check_grad_apart(i);
  }
}

void Plan::note_weights() {
  std::vector<const Entry*> order;
  for (const Entry& entry : entries_) {
    if (entry.weight_bytes > 0) order.push_back(&entry);
  }
  const auto begin = [](const Entry* entry) { return entry->address(kWeight); };
  std::ranges::sort(order, {}, begin);
  // Weights whose first to last bytes overlap may still interleave: then every element is looked at.
  for (size_t first = 0; first < order.size();) {
    const char* end = begin(order[first]) + order[first]->weight_bytes;
    size_t last = first + 1;
    for (; last < order.size() && begin(order[last]) < end; ++last) {
      end = std::max(end, begin(order[last]) + order[last]->weight_bytes);
    }
    SeenBytes seen(begin(order[first]), end);
    for (size_t i = first; last - first > 1 && i < last; ++i) {
      const Entry& entry = *order[i];
      if (!seen.add(begin(&entry), entry.task.element_size[kWeight], entry.sizes(kWeight),
                    entry.strides(kWeight))) {
        refuse(static_cast<size_t>(&entry - entries_.data()),
               "the weight shares memory with another weight of the list");
      }
    }
    first = last;
  }
  weight_extents_.clear();
  by_weight_address_.clear();
  for (const Entry* entry : order) {
    weight_extents_.add(begin(entry), begin(entry) + entry->weight_bytes);
    by_weight_address_.push_back(static_cast<uint32_t>(entry - entries_.data()));
  }
  weights_moved_ = false;
}

// Whether each element of the gradient is as far from the first as that of the weight is.
bool Plan::has_the_same_walk(const Entry& entry) {
  const Dims sizes = entry.sizes(kWeight), weight = entry.strides(kWeight), grad = entry.strides(kGrad);
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] > 1 && weight[d] != grad[d]) return false;
  }
  return true;
}

// Of gradient i, which lies between the first and the last byte of some weights.
void Plan::check_grad_apart(size_t i) const {
  const Entry& entry = entries_[i];
  const char* const grad = entry.address(kGrad);
  for (size_t k = weight_extents_.before(grad + entry.grad_bytes); weight_extents_.reach(k, grad);) {
    const size_t owner = by_weight_address_[--k];
    const Entry& other = entries_[owner];
    const char* const weight = other.address(kWeight);
    if (weight + other.weight_bytes <= grad) continue;
    if (owner == i && weight == grad && !entry.index && has_the_same_walk(entry)) continue;
    SeenBytes seen(weight, weight + other.weight_bytes);
    seen.add(weight, other.task.element_size[kWeight], other.sizes(kWeight), other.strides(kWeight));
    const bool is_apart = !entry.index && seen.has_none(grad, entry.task.element_size[kGrad],
                                                        entry.sizes(kGrad), entry.strides(kGrad));
    if (is_apart) continue;
    refuse(i, owner == i ? "the gradient is the memory of its own weight in another layout; clone() it first"
                         : "the gradient shares memory with the weight of tensor " + std::to_string(owner) +
                               " of the list; clone() it first");
  }
}

void Plan::find_shared_grads(std::span<Plan* const> plans) {
  const auto known = [&](const Plan* plan) { return std::ranges::equal(plan->shared_with_, plans); };
  if (std::ranges::all_of(plans, known)) return;

  struct Range {
    const char *begin, *end;
    Entry* grad_of;  // null: a weight
  };
  std::vector<Range> ranges;
  for (Plan* plan : plans) {
    plan->shared_with_.clear();
    ++plan->grads_version_;
    for (Entry& entry : plan->entries_) {
      const char *weight = entry.address(kWeight), *grad = entry.address(kGrad);
      entry.grad_is_writable = !entry.grad_overlaps && !entry.index;
      if (entry.weight_bytes > 0) ranges.push_back({weight, weight + entry.weight_bytes, nullptr});
      if (entry.grad_bytes > 0) ranges.push_back({grad, grad + entry.grad_bytes, &entry});
    }
  }
  std::ranges::sort(ranges, {}, &Range::begin);
  // A range that begins before the furthest end so far shares memory with the range that reaches there.
  const Range* furthest = nullptr;
  for (const Range& range : ranges) {
    if (furthest != nullptr && range.begin < furthest->end) {
      for (const Range* shared : {&range, furthest}) {
        if (shared->grad_of != nullptr) shared->grad_of->grad_is_writable = false;
      }
    }
    if (furthest == nullptr || range.end > furthest->end) furthest = &range;
  }
  for (Plan* plan : plans) plan->shared_with_.assign(plans.begin(), plans.end());
}

}  // namespace fusedstep
