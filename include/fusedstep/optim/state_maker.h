// The states of a group's weights as its options ask for them: made where they are missing, converted where
// they come from an archive.
#pragma once
#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "fusedstep/optim/errors.h"
#include "fusedstep/optim/operators.h"
#include "fusedstep/optim/options.h"
#include "fusedstep/optim/param_state.h"

namespace fusedstep::optim::detail {

using StatesByWeight = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

// The state of the weight that is at this place; null if it has none. Throws c10::Error for one that is null
// or of another class.
template <class State>
const State* find_state(const StatesByWeight& states, const torch::Tensor& weight, int64_t place) {
  const auto at = states.find(weight.unsafeGetTensorImpl());
  if (at == states.end()) return nullptr;
  TORCH_CHECK(at->second != nullptr, name_of_place(place),
              ": its state is null; erase it, and a step makes a new one");
  const torch::optim::OptimizerParamState& state = *at->second;
  const auto* const found = dynamic_cast<const State*>(&state);
  TORCH_CHECK(found != nullptr, name_of_place(place), ": its state is a ",
              c10::demangle(typeid(state).name()), ", not a ", c10::demangle(typeid(State).name()));
  return found;
}

// Makes states of the kind `State` for one group.
template <class State>
class StateMaker {
 public:
  // The value that a state or number with this name starts at, which is `otherwise` unless an option has it.
  using Initial = std::function<double(std::string_view name, double otherwise)>;

  // `slots`: the states that the group's options need, as indices of State::kStates.
  StateMaker(StatesByWeight& states, const Storage& storage, std::vector<size_t> slots, Initial initial)
      : states_(states), storage_(storage), slots_(std::move(slots)), initial_(std::move(initial)) {}

  // Gives the weights what their states lack, and takes from these what is of no use any more. All weights
  // get it, or none of those that have a state: memory may run out before. Throws c10::Error for what is no
  // state of this kind, with the name of the weight, which is at this place in `names`.
  void make_missing(const Tensors& weights, const std::vector<int64_t>& names) {
    Tensors some;
    std::vector<State> made;
    for (size_t i = 0; i < weights.size(); ++i) {
      const torch::Tensor& weight = weights[i];
      const State* const found = find_state<State>(states_, weight, names[i]);
      if (found != nullptr && is_whole(weight, *found)) continue;
      some.push_back(weight);
      made.push_back(found != nullptr ? State(*found) : State());
    }
    if (some.empty()) return;
    std::map<std::vector<std::string>, std::vector<size_t>> alike;
    for (size_t i = 0; i < some.size(); ++i) alike[storage_of_slots(some[i], made[i])].push_back(i);
    for (const auto& [storage, places] : alike) complete(storage, places, some, made);
    for (size_t i = 0; i < some.size(); ++i) {
      if (find(some[i]) == nullptr) {
        states_.emplace(some[i].unsafeGetTensorImpl(), std::make_unique<State>(std::move(made[i])));
      }
    }
    for (size_t i = 0; i < some.size(); ++i) {  // nothing of this allocates
      if (State* const found = find(some[i]); made[i].step().defined()) *found = std::move(made[i]);
    }
  }

  // Makes numbers of the state of a weight codes, or codes numbers, as the options ask.
  void convert(const torch::Tensor& weight) {
    State& state = *find(weight);
    for (const size_t k : slots_) {
      const torch::Tensor before = state.slot(k);
      if (!before.defined()) continue;
      const std::string_view now = kind_of(before, weight), asked = asked_kind(storage_, weight);
      if (now == asked) continue;
      const bool is_signed = State::is_signed(k);
      const torch::Tensor values = now.empty() ? before : decode(before, state.absmax(k), weight, is_signed);
      if (!asked.empty()) {
        auto [codes, absmax] = encode(values, asked, is_signed);
        state.slot(k, std::move(codes));
        state.absmax(k, std::move(absmax));
      } else {
        const bool is_wide = way_of(storage_, weight) != Way::kNone || !storage_.state_dtype.empty();
        state.slot(k, new_states({weight}, {storage_of_numbers(weight, is_wide)})[0].copy_(values));
        state.absmax(k, torch::Tensor());
      }
    }
  }

 private:
  State* find(const torch::Tensor& weight) {
    const auto found = states_.find(weight.unsafeGetTensorImpl());
    return found == states_.end() ? nullptr : static_cast<State*>(found->second.get());
  }

  bool is_whole(const torch::Tensor& weight, const State& state) const {
    const Way way = way_of(storage_, weight);
    for (size_t k = 0; k < State::kNumbers.size(); ++k) {
      if (!state.number(k).defined()) return false;
    }
    for (const size_t k : slots_) {
      const torch::Tensor& slot = state.slot(k);
      if (!slot.defined() || (is_codes(slot) && !state.absmax(k).defined())) return false;
      // Without anything beside the weight: that its value is wide shows in its states.
      if (way == Way::kStochastic && has_16_bits(slot)) return false;
    }
    if (has_beside(way) && !state.beside(way).defined()) return false;
    return std::ranges::none_of(kWaysBeside, [&](Way each) { return is_left_over(each, way, state); });
  }

  static std::string storage_of_numbers(const torch::Tensor& weight, bool is_wide) {
    return is_wide && has_16_bits(weight) ? "float32" : "weight";
  }

  // The storage of a weight's slots, and of its master weight or compensation, for new_states(). It follows
  // from the states of the weight, and without states from the options.
  std::vector<std::string> storage_of_slots(const torch::Tensor& weight, const State& state) const {
    const Way way = way_of(storage_, weight);
    const auto one = std::ranges::find_if(slots_, [&](size_t k) { return state.slot(k).defined(); });
    const bool is_new = one == slots_.end();
    const bool is_wide = is_new ? !storage_.state_dtype.empty() : !has_16_bits(state.slot(*one));
    const std::string numbers = storage_of_numbers(weight, is_wide || way != Way::kNone);
    const std::string codes(is_new ? asked_kind(storage_, weight) : kind_of(state.slot(*one), weight));
    std::vector<std::string> storage;
    for (const size_t k : slots_) {
      storage.push_back(codes.empty() ? numbers : State::is_signed(k) ? codes : "unsigned " + codes);
    }
    if (has_beside(way)) storage.emplace_back(kBesideStorage[static_cast<size_t>(way)]);
    return storage;
  }

  // Completes the states of those weights that are at these places, whose slots are stored alike.
  void complete(const std::vector<std::string>& storage, const std::vector<size_t>& places,
                const Tensors& all, std::vector<State>& states) const {
    Tensors weights;
    for (const size_t i : places) weights.push_back(all[i]);
    const size_t count = weights.size(), slots = slots_.size();
    const Tensors made = new_states(weights, storage);
    for (size_t i = 0; i < count; ++i) {
      State& state = states[places[i]];
      const Way way = way_of(storage_, weights[i]);
      complete_numbers(state);
      for (size_t s = 0; s < slots; ++s) {
        const torch::Tensor& tensor = made[s * count + i];
        const size_t absmax = (storage.size() + s) * count + i;
        complete_slot(slots_[s], weights[i], tensor, is_codes(tensor) ? made[absmax] : tensor, way, state);
      }
      if (has_beside(way) && !state.beside(way).defined()) {
        state.beside(way, made[slots * count + i]);
        start_beside(way, weights[i], state);
      }
      for (const Way each : kWaysBeside) {
        if (is_left_over(each, way, state)) state.beside(each, torch::Tensor());
      }
    }
  }

  void complete_numbers(State& state) const {
    // Steps before there was any state to keep do not count: SGD's momentum may come later.
    const bool is_first = !state.has_slots() && !slots_.empty();
    for (size_t k = 0; k < State::kNumbers.size(); ++k) {
      if (!is_first && state.number(k).defined()) continue;
      const auto [name, first] = State::kNumbers[k];
      state.number(k, new_number(initial_(name, first)));
    }
  }

  // A state that is there is kept: an option such as amsgrad came later. So may the way: no state is narrower
  // than the value.
  void complete_slot(size_t k, const torch::Tensor& weight, const torch::Tensor& tensor,
                     const torch::Tensor& absmax, Way way, State& state) const {
    const torch::Tensor before = state.slot(k);
    if (!before.defined()) {
      state.slot(k, tensor);
      if (is_codes(tensor)) state.absmax(k, absmax);
      const double value = initial_(State::kStates[k].name, 0);
      if (value != 0) state.fill(k, value, weight);
    } else if (is_codes(before)) {
      if (!state.absmax(k).defined()) state.absmax(k, absmax);
    } else if (way != Way::kNone && before.scalar_type() != tensor.scalar_type()) {
      state.slot(k, before.to(torch::kFloat32));
    }
  }

  // Gives a weight the value that it had in another way, if it had one.
  static void start_beside(Way way, const torch::Tensor& weight, State& state) {
    const torch::Tensor of = weight.detach();
    const auto before = std::ranges::find_if(
        kWaysBeside, [&](Way each) { return each != way && state.beside(each).defined(); });
    if (before != kWaysBeside.end()) {
      state.beside(way).copy_(beside_of(way, of, value_of(*before, of, state.beside(*before))));
    } else if (way == Way::kFloat32) {  // sparse gradients do not reach every row of it
      state.beside(way).copy_(of);
    }
  }

  // True if `state` still has the extra tensor of a storage format that its group no longer uses. A float32
  // master is kept if the group uses no format: the master stays valid as long as it rounds to the weight.
  static bool is_left_over(Way each, Way way, const State& state) {
    return each != way && state.beside(each).defined() && (way != Way::kNone || each != Way::kFloat32);
  }

  static constexpr std::array kWaysBeside{Way::kFloat32, Way::kSplit, Way::kKahan};

  StatesByWeight& states_;
  Storage storage_;
  std::vector<size_t> slots_;
  Initial initial_;
};

}  // namespace fusedstep::optim::detail
