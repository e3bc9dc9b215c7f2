#include "src/step.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>

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

struct alignas(64) ScalarsBlock {
  std::byte bytes[BoundRule::kScalarsBytes];
};

// Prepares the rule's scalars once for each distinct step count, and tells every tensor where its own are.
std::vector<ScalarsBlock> prepare_scalars(Plan& plan, const BoundRule& rule, std::span<const double> steps) {
  using Key = std::pair<double, bool>;
  std::map<Key, size_t> index;
  std::vector<size_t> of_tensor(plan.tensors());
  Key last{-1, false};
  size_t last_index = 0;
  for (size_t i = 0; i < plan.tensors(); ++i) {
    const Key key{steps[i], plan.format(i) == cpu::Format::kDouble};
    if (index.empty() || key != last) {
      last = key;
      last_index = index.try_emplace(key, index.size()).first->second;
    }
    of_tensor[i] = last_index;
  }
  std::vector<ScalarsBlock> blocks(index.size());
  for (const auto& [key, i] : index) rule.prepare(key.first, key.second, blocks[i].bytes);
  for (size_t i = 0; i < plan.tensors(); ++i) plan.task(i).scalars = blocks[of_tensor[i]].bytes;
  return blocks;
}

// One session over chunks [first, last): `kernel_of(tensor)` for each of them.
template <class KernelOf, class Reduce>
void run_chunks(Plan& plan, int threads, int64_t first, int64_t last, Order order, KernelOf kernel_of,
                Reduce reduce) {
  const cpu::KernelTable& table = kernels();
  const auto cost = std::span(plan.cost()).subspan(first, last - first + 1);
  auto work = [&](int64_t i) {
    const int64_t c = first + i;
    const Chunk& chunk = plan.chunks()[c];
    alignas(64) double lanes[2][cpu::kLanes] = {};
    const char* isa =
        table.run(kernel_of(chunk.tensor), plan.task(chunk.tensor), chunk.begin, chunk.end, &lanes[0][0]);
    reduce(c, lanes);
    if (c == first) plan.ran_on = isa;
  };
  run_session(threads, cost, work, order);
}

// The sum of a chunk's lanes, in one fixed order.
double sum_lanes(double (&lanes)[cpu::kLanes]) {
  for (int width = cpu::kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

void run_wave(Plan& plan, const BoundRule& rule, const Wave& wave,
              const std::vector<const cpu::RuleKernels*>& kernels, const StepOptions& options) {
  const auto stores = [&](uint32_t tensor) { return !options.keep_grad && plan.grad_can_store(tensor); };
  run_chunks(
      plan, options.threads, wave.first_chunk, wave.last_chunk, Order::kForwards,
      [&](uint32_t tensor) -> const cpu::SpanKernel& {
        return kernels[tensor]->phase[stores(tensor) ? cpu::kAccumulateStore : cpu::kAccumulate];
      },
      [&](int64_t chunk, double(&lanes)[2][cpu::kLanes]) {
        plan.partial_norms[2 * chunk] = sum_lanes(lanes[0]);
        plan.partial_norms[2 * chunk + 1] = sum_lanes(lanes[1]);
      });
  // Chunk partials in index order, tensor by tensor.
  for (int64_t c = wave.first_chunk; c < wave.last_chunk;) {
    const uint32_t tensor = plan.chunks()[c].tensor;
    double weight_norm2 = 0, update_norm2 = 0;
    for (; c < wave.last_chunk && plan.chunks()[c].tensor == tensor; ++c) {
      weight_norm2 += plan.partial_norms[2 * c];
      update_norm2 += plan.partial_norms[2 * c + 1];
    }
    plan.task(tensor).ratio = rule.trust_ratio(weight_norm2, update_norm2);
  }
  run_chunks(
      plan, options.threads, wave.first_chunk, wave.last_chunk, Order::kBackwards,
      [&](uint32_t tensor) -> const cpu::SpanKernel& {
        return kernels[tensor]->phase[stores(tensor) ? cpu::kApplyStored : cpu::kApplyRecompute];
      },
      [](int64_t, auto&) {});
}

}  // namespace

void run_step(Plan& plan, const BoundRule& rule, std::span<const double> steps, const StepOptions& options) {
  plan.refresh(wave_bytes(options.threads));
  const std::vector<ScalarsBlock> scalars = prepare_scalars(plan, rule, steps);
  std::vector<const cpu::RuleKernels*> kernels_of(plan.tensors());
  for (size_t i = 0; i < plan.tensors(); ++i)
    kernels_of[i] = kernels().find(rule.id, rule.flags, plan.format(i));

  if (rule.trust_ratio == nullptr) {
    run_chunks(
        plan, options.threads, 0, static_cast<int64_t>(plan.chunks().size()), Order::kForwards,
        [&](uint32_t tensor) -> const cpu::SpanKernel& { return kernels_of[tensor]->phase[cpu::kUpdate]; },
        [](int64_t, auto&) {});
    return;
  }
  if (!options.keep_grad) plan.find_aliases();
  for (const Wave& wave : plan.waves()) run_wave(plan, rule, wave, kernels_of, options);
}

void zero_states(Plan& plan, int threads) {
  plan.refresh(wave_bytes(threads));
  auto work = [&](int64_t c) {
    const Chunk& chunk = plan.chunks()[c];
    const cpu::TensorTask& task = plan.task(chunk.tensor);
    for (int k = cpu::kFirstState; k < task.operands; ++k) {
      const int64_t size = task.element_size[k];
      std::memset(static_cast<char*>(task.data[k]) + chunk.begin * size, 0, (chunk.end - chunk.begin) * size);
    }
  };
  run_session(threads, plan.cost(), work);
}

}  // namespace fusedstep
