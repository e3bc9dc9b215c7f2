#include "src/steps/step.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "src/core/code_map.h"
#include "src/run/dispatch.h"
#include "src/run/session.h"

namespace fusedstep {
namespace {

// Bytes that a wave may have for its second stage to find them in the cache: the second-level caches of the
// team.
int64_t wave_bytes(int threads) {
  static const int64_t second_level = std::max<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), int64_t{1} << 20);
  return second_level * std::max(threads, 1);
}

// Calls work(begin, end) for neighbours that make up chunks [first, last), of one tensor each, for a kernel
// to get in one call: a call costs a twentieth of the time of a chunk in the cache.
template <class Work>
void for_neighbours(const Plan& plan, int64_t first, int64_t last, Work work) {
  for (int64_t begin = first, end; begin < last; begin = end) {
    const uint32_t tensor = plan.chunks()[begin].tensor;
    for (end = begin + 1; end < last && plan.chunks()[end].tensor == tensor;) ++end;
    work(begin, end);
  }
}

// A kernel over chunks [begin, end), neighbours of one tensor. `complete(task)` adds to its task what differs
// from step to step.
template <class Complete>
void run_kernel(Plan& plan, int64_t begin, int64_t end, const cpu::SpanKernel& kernel,
                const cpu::GradTreatment& treatment, double* lanes, Complete complete) {
  const cpu::KernelTable& table = kernels();
  Chunk chunk = plan.chunks()[begin];
  chunk.end = plan.chunks()[end - 1].end;
  const char* isa = "";
  plan.run_parts(chunk, [&](TensorTask task, int64_t from, int64_t to) {
    complete(task);
    isa = table.run(kernel, task, treatment, from, to, lanes);
  });
  if (begin == 0) plan.memory().ran_on = isa;
}

// Treatments of a gradient by the phases of a step: one phase does all, or the first multiplies and the last
// clears.
class Treatments {
 public:
  Treatments(const Plan& plan, const StepOptions& options) : plan_(plan), options_(options) {}

  cpu::GradTreatment whole(uint32_t tensor) const { return treatment(tensor, true, true); }
  cpu::GradTreatment first(uint32_t tensor) const { return treatment(tensor, true, false); }
  cpu::GradTreatment last(uint32_t tensor) const { return treatment(tensor, false, true); }

 private:
  cpu::GradTreatment treatment(uint32_t tensor, bool is_first, bool is_last) const {
    const bool own = plan_.grad_is_writable(tensor);
    const bool scale = own && options_.grads == GradUse::kScale && options_.grad_factor != 1;
    cpu::GradTreatment treatment;
    treatment.scale = scale && is_first ? &kernels().grads(plan_.format(tensor))->scale : nullptr;
    treatment.scale_factor = options_.grad_factor;
    treatment.factor = (options_.maximize ? -1 : 1) * (scale ? 1 : options_.grad_factor);
    treatment.clear = own && is_last && options_.grads == GradUse::kClear;
    return treatment;
  }

  const Plan& plan_;
  StepOptions options_;
};

// The sum of partial(chunk) over chunks [first, last), in the order of src/core/reduction.h.
template <class Partial>
double sum_chunks(int64_t first, int64_t last, Partial partial) {
  double sum = 0;
  for (int64_t begin = first; begin < last; begin += kPartialsGroup) {
    double group = 0;
    for (int64_t c = begin; c < std::min(begin + kPartialsGroup, last); ++c) group += partial(c);
    sum += group;
  }
  return sum;
}

// Sets elements [begin, end), which begin with a block, to zero.
void zero_codes(const CodedState& state, void* codes, int64_t begin, int64_t end) {
  const CodeMap& map = *state.map;
  std::memset(static_cast<std::byte*>(codes) + map.bytes_of(begin), zero_byte(map),
              map.bytes_of(end - begin));
  std::fill_n(state.absmax + begin / map.block, map.blocks_of(end - begin), 0.0f);
}

// A rule's kernels for a plan's tensors.
class KernelsByFormat {
 public:
  KernelsByFormat(const Plan& plan, const BoundRule& rule) : plan_(plan) {
    for (size_t format = 0; format < found_.size(); ++format) {
      found_[format] = kernels().find(rule.id, rule.flags, static_cast<Format>(format));
    }
  }
  const cpu::RuleKernels& operator[](uint32_t tensor) const {
    return *found_[static_cast<size_t>(plan_.format(tensor))];
  }

 private:
  const Plan& plan_;
  std::array<const cpu::RuleKernels*, static_cast<size_t>(Format::kCount)> found_{};
};

// A step of an elementwise rule: one stage.
class ElementwiseStep final : public PreparedStep {
 public:
  ElementwiseStep(Plan& plan, const BoundRule& rule, Scalars scalars, const StepOptions& options)
      : plan_(plan),
        scalars_(std::move(scalars)),
        kernels_(plan, rule),
        treatments_(plan, options),
        threads_(options.threads) {
    const Stage stage{plan.cost()};
    make_room(threads_, {&stage, 1}, plan.memory().step_balance);
  }

  void run(const Aside& aside) noexcept override {
    run_session(threads_, plan_.cost(), *this, aside, &plan_.memory().step_balance);
  }

  void operator()(int64_t first, int64_t last) {
    for_neighbours(plan_, first, last, [&](int64_t begin, int64_t end) {
      const uint32_t tensor = plan_.chunks()[begin].tensor;
      run_kernel(plan_, begin, end, kernels_[tensor].phase[cpu::kUpdate], treatments_.whole(tensor), nullptr,
                 [&](TensorTask& task) { scalars_.complete(task, tensor); });
    });
  }

 private:
  Plan& plan_;
  Scalars scalars_;
  KernelsByFormat kernels_;
  Treatments treatments_;
  int threads_;
};

// The phases of a rule with norms, over chunks of a plan.
class NormedPhases {
 public:
  NormedPhases(Plan& plan, const BoundRule& rule, Scalars scalars, const StepOptions& options)
      : plan_(plan),
        rule_(rule),
        scalars_(std::move(scalars)),
        kernels_(plan, rule),
        treatments_(plan, options),
        may_store_(options.grads == GradUse::kScratch || options.grads == GradUse::kClear) {}

  // True if the update stays in the gradient between the phases.
  bool stores(uint32_t tensor) const { return may_store_ && plan_.grad_can_store(tensor); }

  void accumulate(int64_t chunk) {
    const uint32_t tensor = plan_.chunks()[chunk].tensor;
    alignas(64) double lanes[2][kLanes] = {};
    const cpu::Phase phase = stores(tensor) ? cpu::kAccumulateStore : cpu::kAccumulate;
    run_kernel(plan_, chunk, chunk + 1, kernels_[tensor].phase[phase], treatments_.first(tensor),
               &lanes[0][0], [&](TensorTask& task) { scalars_.complete(task, tensor); });
    plan_.memory().partial_norms[2 * chunk] = sum_lanes(lanes[0]);
    plan_.memory().partial_norms[2 * chunk + 1] = sum_lanes(lanes[1]);
  }

  // The sum of squares of a tensor's weight, or of its update.
  double norm2_of(uint32_t tensor, int which) const {
    return sum_chunks(plan_.first_chunk(tensor), plan_.first_chunk(tensor + 1),
                      [&](int64_t c) { return plan_.memory().partial_norms[2 * c + which]; });
  }
  double ratio_of(double weight_norm2, double update_norm2) const {
    return rule_.trust_ratio(rule_, weight_norm2, update_norm2);
  }
  double ratio_of(uint32_t tensor) const { return ratio_of(norm2_of(tensor, 0), norm2_of(tensor, 1)); }

  // Chunks of one tensor.
  void apply(int64_t begin, int64_t end, double ratio) {
    const uint32_t tensor = plan_.chunks()[begin].tensor;
    const cpu::Phase phase = stores(tensor) ? cpu::kApplyStored : cpu::kApplyRecompute;
    if (begin == plan_.first_chunk(tensor)) plan_.memory().ratios[tensor] = ratio;
    run_kernel(plan_, begin, end, kernels_[tensor].phase[phase], treatments_.last(tensor), nullptr,
               [&](TensorTask& task) {
                 scalars_.complete(task, tensor);
                 task.ratio = ratio;
               });
  }

 private:
  Plan& plan_;
  BoundRule rule_;
  Scalars scalars_;
  KernelsByFormat kernels_;
  Treatments treatments_;
  bool may_store_;
};

// A step of a rule with a trust ratio. Each wave has two stages, of which the second waits for the norms of
// the first. Tensors of one chunk need no wave, and nobody to wait for: both phases at once, in one stage for
// all.
class TwoPhaseStep final : public PreparedStep {
 public:
  TwoPhaseStep(Plan& plan, const BoundRule& rule, Scalars scalars, const StepOptions& options)
      : plan_(plan), phases_(plan, rule, std::move(scalars), options), threads_(options.threads) {
    stages_.reserve(1 + 2 * plan.waves().size());
    parts_.reserve(stages_.capacity());
    const auto add = [&](Phases phases, const std::vector<int64_t>& cost, int64_t first, int64_t last) {
      // The second phase finds the last that the first wrote in the cache.
      const bool second = phases == Phases::kSecond;
      stages_.push_back({std::span(cost).subspan(first, last - first + 1), second, second});
      parts_.push_back({phases, first});
    };
    if (plan.single_cost().back() > 0) {
      add(Phases::kBoth, plan.single_cost(), 0, static_cast<int64_t>(plan.chunks().size()));
    }
    for (const Wave& wave : plan.waves()) {
      add(Phases::kFirst, plan.wave_cost(), wave.first, wave.last);
      add(Phases::kSecond, plan.wave_cost(), wave.first, wave.last);
    }
    make_room(threads_, stages_, plan.memory().step_balance);
  }

  void run(const Aside& aside) noexcept override {
    run_stages(threads_, stages_, *this, aside, &plan_.memory().step_balance);
  }

  void run_direction(double* norms2) override {
    auto work = [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) phases_.accumulate(c);
    };
    run_session(threads_, plan_.cost(), work, {}, &plan_.memory().step_balance);
    for (uint32_t i = 0; i < plan_.tensors(); ++i) {
      for (const int which : {0, 1}) norms2[2 * i + which] = phases_.norm2_of(i, which);
    }
  }

  void run_apply(const double* norms2) override {
    auto work = [&](size_t, Pieces& pieces) {
      for (int64_t first, last; pieces.next(first, last);) {
        for_neighbours(plan_, first, last, [&](int64_t begin, int64_t end) {
          const uint32_t tensor = plan_.chunks()[begin].tensor;
          phases_.apply(begin, end, phases_.ratio_of(norms2[2 * tensor], norms2[2 * tensor + 1]));
        });
      }
    };
    // Each thread finds the last that it wrote in the first phase in its cache.
    const Stage stage{plan_.cost(), /*waits=*/false, /*backwards=*/true};
    run_stages(threads_, {&stage, 1}, work, {}, &plan_.memory().step_balance);
  }

  void operator()(size_t stage, Pieces& pieces) {
    const auto [phases, first_chunk] = parts_[stage];
    Ratio ratio;
    for (int64_t begin, end; pieces.next(begin, end);) {
      const int64_t first = first_chunk + begin, last = first_chunk + end;
      switch (phases) {
        case Phases::kFirst:
          for (int64_t c = first; c < last; ++c) {
            if (!is_single(c)) phases_.accumulate(c);
          }
          break;
        case Phases::kSecond:
          apply_wave(first, last, ratio);
          break;
        case Phases::kBoth:
          for (int64_t c = first; c < last; ++c) {
            if (!is_single(c)) continue;
            phases_.accumulate(c);
            phases_.apply(c, c + 1, phases_.ratio_of(plan_.chunks()[c].tensor));
          }
      }
    }
  }

 private:
  enum class Phases : uint8_t { kFirst, kSecond, kBoth };
  struct Part {
    Phases phases;
    int64_t first_chunk;
  };

  // The trust ratio that a thread found last.
  struct Ratio {
    std::optional<uint32_t> tensor;
    double value = 0;
  };

  bool is_single(int64_t chunk) const { return plan_.has_one_chunk(plan_.chunks()[chunk].tensor); }

  // Every thread finds the ratios that it needs: to wait until one has found them all would take longer.
  void apply_wave(int64_t first, int64_t last, Ratio& ratio) {
    for_neighbours(plan_, first, last, [&](int64_t begin, int64_t end) {
      if (is_single(begin)) return;
      const uint32_t tensor = plan_.chunks()[begin].tensor;
      if (ratio.tensor != tensor) ratio = {tensor, phases_.ratio_of(tensor)};
      phases_.apply(begin, end, ratio.value);
    });
  }

  Plan& plan_;
  NormedPhases phases_;
  int threads_;
  std::vector<Stage> stages_;
  std::vector<Part> parts_;
};

// Makes the plan ready for a step.
void refresh(Plan& plan, const BoundRule& rule, const StepOptions& options) {
  plan.use_signs(rule.not_negative);
  plan.refresh(wave_bytes(options.threads));
  find_aliasing(plan, options);
}

}  // namespace

void find_aliasing(Plan& plan, const StepOptions& options) {
  if (options.grads == GradUse::kLeave || plan.aliasing_is_known()) return;
  Plan* const alone[] = {&plan};
  Plan::find_aliasing_grads(alone);
}

namespace {

// Returns whether one block of scalars does for all tensors of the plan: they have the precision of the
// first, and its numbers to the bit, of which one may be NaN. Nearly always they have.
bool have_one_block(const Plan& plan, const BoundRule& rule, std::span<const double> numbers) {
  const size_t tensors = plan.tensors();
  bool same = true;
  for (size_t k = 0; k <= rule.numbers.size(); ++k) {
    const auto of_tensors = numbers.subspan(k * tensors, tensors);
    const auto first = std::bit_cast<uint64_t>(of_tensors[0]);
    for (const double number : of_tensors) same &= std::bit_cast<uint64_t>(number) == first;
  }
  const bool is_double = plan.format(0) == Format::kDouble;
  for (size_t i = 1; same && i < tensors; ++i) same = (plan.format(i) == Format::kDouble) == is_double;
  return same;
}

}  // namespace

Scalars prepare_scalars(const Plan& plan, const BoundRule& rule, std::span<double> numbers) {
  const size_t tensors = plan.tensors();
  Scalars scalars;
  std::vector<std::array<double, kMaxNumbers>> after;  // the numbers of each block
  const auto add = [&](size_t i) {
    std::array<double, kMaxNumbers>& its = after.emplace_back();
    for (size_t k = 0; k <= rule.numbers.size(); ++k) its[k] = numbers[k * tensors + i];
    ScalarsBlock& block = scalars.blocks.emplace_back();
    block.rounding = rule.rounds_by_step ? rounding_of_step(its[0]) : CodeMap::kToNearest;
    rule.prepare(rule, its[0], &its[1], plan.format(i) == Format::kDouble, block.bytes);
  };
  for (size_t i = 0; plan.rounds_at_random() && i < tensors; ++i) {
    scalars.draws.push_back(plan.draws(i, numbers[i]));
  }
  if (tensors > 0 && have_one_block(plan, rule, numbers)) {
    add(0);
  } else {
    // A tensor's precision and the bits of its numbers.
    using Key = std::array<uint64_t, 1 + kMaxNumbers>;
    const auto key_of = [&](size_t i) {
      Key key{plan.format(i) == Format::kDouble};
      for (size_t k = 0; k <= rule.numbers.size(); ++k) {
        key[1 + k] = std::bit_cast<uint64_t>(numbers[k * tensors + i]);
      }
      return key;
    };
    std::map<Key, uint32_t> index;
    scalars.of_tensor.resize(tensors);
    for (size_t i = 0; i < tensors; ++i) {
      if (i > 0 && key_of(i) == key_of(i - 1)) {
        scalars.of_tensor[i] = scalars.of_tensor[i - 1];
        continue;
      }
      const auto [found, is_new] = index.try_emplace(key_of(i), static_cast<uint32_t>(index.size()));
      if (is_new) add(i);
      scalars.of_tensor[i] = found->second;
    }
  }
  for (size_t k = 1; k <= rule.numbers.size(); ++k) {
    for (size_t i = 0; i < tensors; ++i) {
      numbers[k * tensors + i] = after[scalars.of_tensor.empty() ? 0 : scalars.of_tensor[i]][k];
    }
  }
  return scalars;
}

std::unique_ptr<PreparedStep> prepare_step(Plan& plan, const BoundRule& rule, std::span<double> numbers,
                                           const StepOptions& options) {
  if (rule.make_step != nullptr) return rule.make_step(plan, rule, numbers, options, {});
  refresh(plan, rule, options);
  Scalars scalars = prepare_scalars(plan, rule, numbers);
  if (rule.trust_ratio != nullptr) {
    return std::make_unique<TwoPhaseStep>(plan, rule, std::move(scalars), options);
  }
  return std::make_unique<ElementwiseStep>(plan, rule, std::move(scalars), options);
}

void sum_entries(Plan& plan, int threads) {
  // Sums, or joins, of a tensor that a thread takes together.
  struct Item {
    size_t tensor;
    int64_t begin, end;
  };
  std::vector<Item> items[2];
  std::vector<int64_t> cost[2]{{0}, {0}};
  const auto add_items = [&](int stage, size_t tensor, int64_t count, auto cost_of) {
    for (int64_t begin = 0, end = 0; begin < count; begin = end) {
      int64_t elements = 0;
      while (end < count && elements < kChunkElements) elements += cost_of(end++);
      items[stage].push_back({tensor, begin, end});
      cost[stage].push_back(cost[stage].back() + elements);
    }
  };
  for (size_t i = 0; i < plan.tensors(); ++i) {
    const SparseRows* const rows = plan.rows(i);
    if (rows == nullptr) continue;
    add_items(0, i, rows->sums(), [&](int64_t sum) { return rows->sum_cost(sum); });
    add_items(1, i, rows->joins(), [&](int64_t join) { return rows->join_cost(join); });
  }
  auto work = [&](size_t stage, Pieces& pieces) {
    for (int64_t begin, end; pieces.next(begin, end);) {
      for (int64_t i = begin; i < end; ++i) {
        const Item& item = items[stage][i];
        const SparseRows& rows = *plan.rows(item.tensor);
        const cpu::SpanKernel& kernel = kernels().grads(plan.format(item.tensor))->add;
        cpu::Span span{};
        const auto add = [&](std::byte* to, std::byte* entry, int64_t elements) {
          span.operand[kWeight] = to;
          span.operand[kGrad] = entry;
          span.count = elements;
          kernel.run(span);
        };
        for (int64_t k = item.begin; k < item.end; ++k) {
          if (stage == 0) {
            rows.make_sum(k, add);
          } else {
            rows.make_join(k, add);
          }
        }
      }
    }
  };
  const Stage stages[] = {{cost[0]}, {cost[1], /*waits=*/true}};
  run_stages(threads, std::span(stages).first(items[1].empty() ? 1 : 2), work);
}

double grad_norm2(Plan& plan, int threads) {
  plan.refresh(wave_bytes(threads));
  auto work = [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const Format format = plan.format(plan.chunks()[c].tensor);
      alignas(64) double lanes[kLanes] = {};
      run_kernel(plan, c, c + 1, kernels().grads(format)->norm, {}, lanes, [](TensorTask&) {});
      plan.memory().partial_norms[c] = sum_lanes(lanes);
    }
  };
  run_session(threads, plan.cost(), work, {}, &plan.memory().norm_balance);
  return sum_chunks(0, static_cast<int64_t>(plan.chunks().size()),
                    [&](int64_t c) { return plan.memory().partial_norms[c]; });
}

void zero_states(Plan& plan, int threads) {
  plan.refresh(wave_bytes(threads));
  auto work = [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const Chunk& chunk = plan.chunks()[c];
      const TensorTask& task = plan.task(chunk.tensor);
      for (int k = kFirstState; k < task.operands; ++k) {
        if (task.is_coded(k)) {
          zero_codes(task.coded[k - kFirstState], task.data[k], chunk.begin, chunk.end);
          continue;
        }
        const int64_t size = task.element_size[k];
        std::memset(static_cast<char*>(task.data[k]) + chunk.begin * size, 0,
                    (chunk.end - chunk.begin) * size);
      }
    }
  };
  run_session(threads, plan.cost(), work);
}

}  // namespace fusedstep
