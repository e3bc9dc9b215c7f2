#include "src/step.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <map>
#include <type_traits>

#include "src/dispatch.h"
#include "src/session.h"

namespace fusedstep {
namespace {

// Bytes that a wave may have for its second session to find them in the cache: the second-level caches of the
// team.
int64_t wave_bytes(int threads) {
  static const int64_t second_level = std::max<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), int64_t{1} << 20);
  return second_level * std::max(threads, 1);
}

// A session that reads what the one before it wrote goes backwards, and finds the last of that in the cache.
enum class Order { kForwards, kBackwards };

// Neighbouring chunks of a tensor that a kernel gets in one call where none has sums of its own: a call costs
// a twentieth of the time of a chunk in the cache. No more of them, so that a session that goes backwards
// does so.
constexpr int64_t kChunksTogether = 4;

// Calls work(begin, end) for neighbours that make up chunks [first, last): of one tensor, `most` at most.
template <class Work>
void for_neighbours(const Plan& plan, int64_t first, int64_t last, Order order, int64_t most, Work work) {
  const auto are_together = [&](int64_t a, int64_t b) {
    return plan.chunks()[a].tensor == plan.chunks()[b].tensor;
  };
  if (order == Order::kForwards) {
    for (int64_t begin = first, end; begin < last; begin = end) {
      for (end = begin + 1; end < std::min(begin + most, last) && are_together(begin, end);) ++end;
      work(begin, end);
    }
  } else {
    for (int64_t end = last, begin; end > first; end = begin) {
      for (begin = end - 1; begin > std::max(end - most, first) && are_together(begin - 1, begin);) --begin;
      work(begin, end);
    }
  }
}

// One session over chunks [first, last): `kernel_of(tensor)` for each of them. `complete(task, tensor)` adds
// to a tensor's task what differs from step to step. `reduce(chunk, lanes)`, if any, gets a chunk's sums.
template <class Complete, class KernelOf, class TreatmentOf, class Reduce = std::nullptr_t>
void run_chunks(Plan& plan, int threads, int64_t first, int64_t last, Order order, Complete complete,
                KernelOf kernel_of, TreatmentOf treatment_of, Reduce reduce = nullptr) {
  constexpr bool kReduces = !std::is_null_pointer_v<Reduce>;
  const cpu::KernelTable& table = kernels();
  const auto cost = std::span(plan.cost()).subspan(first, last - first + 1);
  const auto run = [&](int64_t begin, int64_t end) {
    Chunk chunk = plan.chunks()[begin];
    chunk.end = plan.chunks()[end - 1].end;
    alignas(64) double lanes[2][kLanes] = {};
    const cpu::SpanKernel& kernel = kernel_of(chunk.tensor);
    const cpu::GradTreatment treatment = treatment_of(chunk.tensor);
    const char* isa = "";
    plan.run_parts(chunk, [&](cpu::TensorTask task, int64_t from, int64_t to) {
      complete(task, chunk.tensor);
      isa = table.run(kernel, task, treatment, from, to, &lanes[0][0]);
    });
    if constexpr (kReduces) reduce(begin, lanes);
    if (begin == first) plan.ran_on = isa;
  };
  auto work = [&](int64_t begin, int64_t end) {
    for_neighbours(plan, first + begin, first + end, order, kReduces ? 1 : kChunksTogether, run);
  };
  run_session(threads, cost, work);
}

// What the sessions of a step do with a gradient: all of it in the one, or first multiplied, last cleared.
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
  const StepOptions& options_;
};

// The sum of a chunk's lanes, in the order of src/reduction.h.
double sum_lanes(double (&lanes)[kLanes]) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// The sum of partial(chunk) over chunks [first, last), in the order of src/reduction.h.
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

void run_wave(Plan& plan, const BoundRule& rule, const Wave& wave, const KernelsByFormat& kernels,
              const Scalars& scalars, const StepOptions& options) {
  const Treatments treatments(plan, options);
  const bool scratch = options.grads == GradUse::kScratch || options.grads == GradUse::kClear;
  const auto stores = [&](uint32_t tensor) { return scratch && plan.grad_can_store(tensor); };
  run_chunks(
      plan, options.threads, wave.first_chunk, wave.last_chunk, Order::kForwards,
      [&](cpu::TensorTask& task, uint32_t tensor) { task.scalars = scalars.of(tensor); },
      [&](uint32_t tensor) -> const cpu::SpanKernel& {
        return kernels[tensor].phase[stores(tensor) ? cpu::kAccumulateStore : cpu::kAccumulate];
      },
      [&](uint32_t tensor) { return treatments.first(tensor); },
      [&](int64_t chunk, double(&lanes)[2][kLanes]) {
        plan.partial_norms[2 * chunk] = sum_lanes(lanes[0]);
        plan.partial_norms[2 * chunk + 1] = sum_lanes(lanes[1]);
      });
  // The ratio of a tensor with one chunk is found by whoever has that: the small ones of a list are then
  // shared among the threads.
  const auto has_one_chunk = [&](int64_t tensor) {
    return plan.first_chunk(tensor + 1) - plan.first_chunk(tensor) == 1;
  };
  const auto ratio_of = [&](int64_t tensor) {
    const auto norm2 = [&](int which) {
      return sum_chunks(plan.first_chunk(tensor), plan.first_chunk(tensor + 1),
                        [&](int64_t c) { return plan.partial_norms[2 * c + which]; });
    };
    return rule.trust_ratio(norm2(0), norm2(1));
  };
  for (auto tensor = static_cast<int64_t>(wave.first); tensor < static_cast<int64_t>(wave.last); ++tensor) {
    if (!has_one_chunk(tensor)) plan.task(tensor).ratio = ratio_of(tensor);
  }
  run_chunks(
      plan, options.threads, wave.first_chunk, wave.last_chunk, Order::kBackwards,
      [&](cpu::TensorTask& task, uint32_t tensor) {
        task.scalars = scalars.of(tensor);
        if (has_one_chunk(tensor)) task.ratio = plan.task(tensor).ratio = ratio_of(tensor);
      },
      [&](uint32_t tensor) -> const cpu::SpanKernel& {
        return kernels[tensor].phase[stores(tensor) ? cpu::kApplyStored : cpu::kApplyRecompute];
      },
      [&](uint32_t tensor) { return treatments.last(tensor); });
}

}  // namespace

Scalars prepare_scalars(const Plan& plan, const BoundRule& rule, std::span<const double> steps) {
  using Key = std::pair<double, bool>;
  std::map<Key, uint32_t> index;
  Scalars scalars;
  scalars.of_tensor.resize(plan.tensors());
  Key last{-1, false};
  uint32_t last_index = 0;
  for (size_t i = 0; i < plan.tensors(); ++i) {
    const Key key{steps[i], plan.format(i) == Format::kDouble};
    if (index.empty() || key != last) {
      last = key;
      last_index = index.try_emplace(key, static_cast<uint32_t>(index.size())).first->second;
    }
    scalars.of_tensor[i] = last_index;
  }
  scalars.blocks.resize(index.size());
  if (index.size() == 1) scalars.of_tensor.clear();
  for (const auto& [key, i] : index) rule.prepare(key.first, key.second, scalars.blocks[i].bytes);
  return scalars;
}

void run_step(Plan& plan, const BoundRule& rule, std::span<const double> steps, const StepOptions& options) {
  plan.refresh(wave_bytes(options.threads));
  if (options.grads != GradUse::kLeave && !plan.shares_are_known()) {
    Plan* const alone[] = {&plan};
    Plan::find_shared_grads(alone);
  }
  const Scalars scalars = prepare_scalars(plan, rule, steps);
  const KernelsByFormat kernels_of(plan, rule);

  if (rule.trust_ratio) {
    for (const Wave& wave : plan.waves()) run_wave(plan, rule, wave, kernels_of, scalars, options);
    return;
  }
  const Treatments treatments(plan, options);
  run_chunks(
      plan, options.threads, 0, static_cast<int64_t>(plan.chunks().size()), Order::kForwards,
      [&](cpu::TensorTask& task, uint32_t tensor) { task.scalars = scalars.of(tensor); },
      [&](uint32_t tensor) -> const cpu::SpanKernel& { return kernels_of[tensor].phase[cpu::kUpdate]; },
      [&](uint32_t tensor) { return treatments.whole(tensor); });
}

void sum_entries(Plan& plan, int threads) {
  struct Item {
    size_t tensor;
    int64_t sum;
  };
  std::vector<Item> items;
  std::vector<int64_t> cost{0};
  for (size_t i = 0; i < plan.tensors(); ++i) {
    const Rows* rows = plan.rows(i);
    for (int64_t sum = 0; rows != nullptr && sum < rows->sums(); ++sum) {
      items.push_back({i, sum});
      cost.push_back(cost.back() + rows->sum_cost(sum));
    }
  }
  auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto [tensor, sum] = items[i];
      plan.rows(tensor)->make_sum(sum, kernels().grads(plan.format(tensor))->add);
    }
  };
  run_session(threads, cost, work);
}

double grad_norm2(Plan& plan, int threads) {
  plan.refresh(wave_bytes(threads));
  const auto chunks = static_cast<int64_t>(plan.chunks().size());
  run_chunks(
      plan, threads, 0, chunks, Order::kForwards, [](cpu::TensorTask&, uint32_t) {},
      [&](uint32_t tensor) -> const cpu::SpanKernel& { return kernels().grads(plan.format(tensor))->norm; },
      [](uint32_t) { return cpu::GradTreatment{}; },
      [&](int64_t chunk, double(&lanes)[2][kLanes]) { plan.partial_norms[chunk] = sum_lanes(lanes[0]); });
  return sum_chunks(0, chunks, [&](int64_t c) { return plan.partial_norms[c]; });
}

void zero_states(Plan& plan, int threads) {
  plan.refresh(wave_bytes(threads));
  auto work = [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const Chunk& chunk = plan.chunks()[c];
      const cpu::TensorTask& task = plan.task(chunk.tensor);
      for (int k = kFirstState; k < task.operands; ++k) {
        const int64_t size = task.element_size[k];
        std::memset(static_cast<char*>(task.data[k]) + chunk.begin * size, 0,
                    (chunk.end - chunk.begin) * size);
      }
    }
  };
  run_session(threads, plan.cost(), work);
}

}  // namespace fusedstep
