#include "src/plan/plan.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <utility>

#include "src/core/reduction.h"
#include "src/plan/code_maps.h"
#include "src/plan/operand_checks.h"
#include "src/run/tuning.h"

namespace fusedstep {
namespace {

// Lists dtypes, sizes and strides of a tensor's operands, one behind another.
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

// Returns whether shape_of(views) would be `shape`. Asked for every tensor at every step; nearly always it
// is.
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

}  // namespace

Plan::Plan(size_t tensors, int slots, int device, bool masters)
    : slots_(slots),
      device_(device),
      walked_(slots),
      masters_(masters),
      entries_(tensors),
      tasks_(tensors),
      facts_(tensors) {
  for (size_t i = 0; i < tensors; ++i) tasks_[i].coded = entries_[i].coded.data();
}

void Plan::round_at_random(uint64_t seed, std::vector<int64_t> places) {
  if (places.size() != tensors() || masters_ || slots_ == kMaxStates) {
    throw std::runtime_error("to round at random takes a place for each weight, and no master copies");
  }
  seed_ = seed;
  places_ = std::move(places);
  ++operands_version_;
}

uint64_t Plan::draws(size_t i, double step) const {
  return key_of_draws(seed_, static_cast<uint64_t>(step), place(i));
}

void Plan::use_roles(std::span<const Role> roles) {
  if (roles.empty()) return;
  if (std::ssize(roles) < slots_) {
    throw std::runtime_error("the plan has " + std::to_string(slots_) + " states for each weight, the rule " +
                             std::to_string(roles.size()));
  }
  roles_.assign(roles.begin(), roles.begin() + slots_);
  walked_ = static_cast<int>(std::ranges::count(roles_, Role::kElement));
  numbers_.resize(tensors());
}

void Plan::bind(size_t i, const TensorOperands& operands, int threads) {
  if (roles_.empty()) return bind_elements(i, operands, threads);
  TensorOperands walked = operands;
  std::array<void*, kMaxStates> numbers{};
  for (int k = 0, at = 0; k < slots_; ++k) {
    const TensorView& state = operands.states[k];
    if (roles_[k] == Role::kElement) {
      walked.states[at++] = state;
      continue;
    }
    check_numbers(i, operands.weight, state, roles_[k]);
    numbers[k] = state.data;
  }
  bind_elements(i, walked, threads);
  if (numbers_[i] != numbers) ++operands_version_;
  numbers_[i] = numbers;
}

void Plan::bind_elements(size_t i, const TensorOperands& operands, int threads) {
  Entry& entry = entries_[i];
  TensorTask& task = tasks_[i];
  Facts& facts = facts_[i];
  const TensorView* views[kMaxOperands] = {&operands.weight, &operands.grad};
  for (int k = 0; k < walked_; ++k) views[kFirstState + k] = &operands.states[k];
  int count = kFirstState + walked_;
  check_devices(i, operands, walked_, device_);
  const WeightCode weight_code = checked_weight_code(i, operands, walked_, masters_, rounds_at_random());
  // Codes lie by rows and columns, whatever the shape of the bytes that hold them.
  std::array<TensorView, kMaxStates> decoded;
  std::array<CodedState, kMaxStates> coded{};
  std::vector<int64_t> in_order;
  bool has_codes = false;
  for (int k = 0; k < walked_; ++k) {
    const TensorView& state = operands.states[k];
    if (!state.has_codes()) continue;
    if (!std::exchange(has_codes, true)) in_order = strides_in_order(operands.weight.sizes);
    const Storage storage = checked_storage(i, operands.weight, state);
    coded[k] = {&step_map(storage, (not_negative_ >> k & 1) == 0), state.absmax};
    decoded[k] = state;
    decoded[k].sizes = operands.weight.sizes;
    decoded[k].strides = in_order;
    views[kFirstState + k] = &decoded[k];
  }

  // The values of weights that are rounded at random are on tiles alone.
  TensorView values{nullptr, DType::kFloat, operands.weight.sizes, {}};
  const bool is_random = weight_code == WeightCode::kRandom;
  if (is_random) {
    if (in_order.empty()) in_order = strides_in_order(operands.weight.sizes);
    values.strides = in_order;
    views[count++] = &values;
  }

  const bool changed = entry.layout == nullptr || entry.index.has_value() != operands.rows.has_value() ||
                       (entry.index && entry.index->dims != operands.rows->dims) ||
                       !is_shape_of(entry.shape, {views, views + count});
  const Format format = changed ? checked_format(i, operands, walked_, masters_, weight_code) : facts.format;
  if (operands.rows && device_ == kHost) check_rows(i, *operands.rows, operands.weight.sizes, threads);
  if (changed) {
    const int indexed_dims = operands.rows ? operands.rows->dims : 0;
    std::vector<Dims> strides;
    for (int k = 0; k < count; ++k) strides.push_back(views[k]->strides.subspan(indexed_dims));
    // All that allocates comes first: if it throws, nothing has changed.
    const Dims sizes = operands.weight.sizes.subspan(indexed_dims);
    const bool is_in_order = has_codes || is_random;
    auto layout = std::make_unique<Layout>(sizes, strides, is_in_order);
    if (weight_code != WeightCode::kPlain && !is_in_order && !layout->dense()) {
      layout = std::make_unique<Layout>(sizes, strides, true);
    }
    std::vector<int64_t> shape = shape_of({views, views + count});
    entry.grad_overlaps = overlaps_itself(operands.grad.sizes, operands.grad.strides);
    entry.layout = std::move(layout);
    facts.format = format;
    entry.shape = std::move(shape);
    entry.weight_bytes = span_bytes(operands.weight);
    facts.grad_bytes = span_bytes(operands.grad);
    task.operands = static_cast<uint8_t>(count);
    task.layout = entry.layout->blocks();
    task.has_codes = has_codes;
    task.weight_code = weight_code;
    for (int k = 0; k < count; ++k) {
      task.element_size[k] = static_cast<uint8_t>(element_size(views[k]->dtype));
    }
    if (is_random) task.element_size[count - 1] = 0;
    stale_ = weights_moved_ = true;
    ++operands_version_;
    ++grads_version_;
    stepped_with_.clear();
  }
  if (task.data[kWeight] != operands.weight.data) weights_moved_ = true;
  if (task.data[kWeight] != operands.weight.data || task.data[kGrad] != operands.grad.data) {
    stepped_with_.clear();
  }
  for (int k = 0; k < count; ++k) {
    if (task.data[k] == views[k]->data) continue;
    task.data[k] = views[k]->data;
    ++(k == kGrad ? grads_version_ : operands_version_);
  }
  for (int k = 0; k < walked_; ++k) {
    if (entry.coded[k] == coded[k]) continue;
    entry.coded[k] = coded[k];
    ++operands_version_;
  }
  if (operands.rows) {
    bind_rows(i, operands, *operands.rows, threads);
  } else {
    entry.index.reset();
    entry.rows.reset();
    facts.rows = nullptr;
  }
}

void Plan::use_signs(uint32_t not_negative) {
  if (not_negative_ == not_negative) return;
  not_negative_ = not_negative;
  for (Entry& entry : entries_) {
    for (int k = 0; k < walked_; ++k) {
      const CodeMap*& map = entry.coded[k].map;
      if (map != nullptr) map = &step_map(map->storage, (not_negative >> k & 1) == 0);
    }
  }
  ++operands_version_;
}

void Plan::move_grad(size_t i, void* data) {
  tasks_[i].data[kGrad] = data;
  ++grads_version_;
  stepped_with_.clear();
}

void Plan::bind_rows(size_t i, const TensorOperands& operands, const RowIndex& index, int threads) {
  Entry& entry = entries_[i];
  const int64_t units = entry.units();
  const bool was_stale = std::exchange(stale_, true);  // it stays so if there is no memory for the rows
  entry.index = index;
  ++grads_version_;
  if (device_ == kHost) {
    SparseRows& rows = entry.rows ? *entry.rows : entry.rows.emplace();
    facts_[i].rows = &rows;
    std::vector<Dims> strides{operands.weight.strides, operands.grad.strides};
    for (int k = 0; k < walked_; ++k) strides.push_back(operands.states[k].strides);
    rows.assign(index, operands.weight.sizes, strides, operands.grad.data, element_size(operands.grad.dtype),
                threads);
  }
  stale_ = was_stale || entry.units() != units;
  facts_[i].grad_bytes = index.entries * span_bytes(operands.grad);
  stepped_with_.clear();
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
    for (int k = 0; k < tasks_[i].operands; ++k) {
      tensor_bytes += units * layout.elements_per_unit() * tasks_[i].element_size[k];
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
  memory_.partial_norms.resize(2 * chunks_.size());
  memory_.ratios.resize(entries_.size());
  memory_.step_balance.may_steal = memory_.norm_balance.may_steal = !stays_in_cache(all_bytes);
  const PrefetchDistance ahead = prefetch_distance(all_bytes, wave_bytes);
  for (TensorTask& task : tasks_) task.ahead = ahead;
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
  return grad_is_writable(i) && (format(i) == Format::kFloat || format(i) == Format::kDouble);
}

void Plan::check_weights_apart() {
  if (weights_moved_) note_weights();
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (facts_[i].grad_bytes > 0 && !grad_is_apart(i, address(i, kGrad))) check_grad_apart(i);
  }
}

void Plan::note_weights() {
  std::vector<uint32_t> order;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].weight_bytes > 0) order.push_back(static_cast<uint32_t>(i));
  }
  std::ranges::sort(order, {}, [&](uint32_t i) { return address(i, kWeight); });
  std::vector<Elements> weights;
  weights.reserve(order.size());
  for (const uint32_t i : order) weights.push_back(elements(i, kWeight));
  if (const std::optional<size_t> sharing = find_sharing(weights)) {
    refuse(order[*sharing], "the weight shares memory with another weight of the list");
  }
  weight_extents_.clear();
  for (const Elements& weight : weights) weight_extents_.add(weight.begin, weight.end);
  by_weight_address_ = std::move(order);
  weights_moved_ = false;
}

// Returns whether the gradient has the weight's strides, where they matter.
bool Plan::has_the_same_walk(const Entry& entry) {
  const Dims sizes = entry.sizes(kWeight), weight = entry.strides(kWeight), grad = entry.strides(kGrad);
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] > 1 && weight[d] != grad[d]) return false;
  }
  return true;
}

// Throws if an element of gradient i, which lies between the first and the last byte of some weights, is in
// one.
void Plan::check_grad_apart(size_t i) const {
  const Entry& entry = entries_[i];
  const char* const grad = address(i, kGrad);
  for (size_t k = weight_extents_.before(grad + facts_[i].grad_bytes); weight_extents_.reach(k, grad);) {
    const size_t owner = by_weight_address_[--k];
    const char* const weight = address(owner, kWeight);
    if (weight + entries_[owner].weight_bytes <= grad) continue;
    if (owner == i && weight == grad && !entry.index && has_the_same_walk(entry)) continue;
    if (!entry.index && !share_memory(elements(owner, kWeight), elements(i, kGrad))) continue;
    refuse(i, owner == i ? "the gradient is the memory of its own weight in another layout; clone() it first"
                         : "the gradient shares memory with the weight of tensor " + std::to_string(owner) +
                               " of the list; clone() it first");
  }
}

void Plan::find_aliasing_grads(std::span<Plan* const> plans) {
  const auto is_known = [&](const Plan* plan) { return std::ranges::equal(plan->stepped_with_, plans); };
  if (std::ranges::all_of(plans, is_known)) return;
  std::vector<Extent> extents;
  for (Plan* plan : plans) {
    plan->stepped_with_.clear();
    ++plan->grads_version_;
    for (size_t i = 0; i < plan->tensors(); ++i) {
      const char *weight = plan->address(i, kWeight), *grad = plan->address(i, kGrad);
      const Entry& entry = plan->entries_[i];
      Facts& facts = plan->facts_[i];
      facts.grad_is_writable = !entry.grad_overlaps && !entry.index;
      if (entry.weight_bytes > 0) extents.push_back({weight, weight + entry.weight_bytes, nullptr});
      if (facts.grad_bytes > 0) extents.push_back({grad, grad + facts.grad_bytes, &facts.grad_is_writable});
    }
  }
  find_aliasing(extents);
  for (Plan* plan : plans) plan->stepped_with_.assign(plans.begin(), plans.end());
}

}  // namespace fusedstep
