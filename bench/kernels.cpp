// The kernels alone, without torch: every rule, over single sizes and the tensors of models, on every
// instruction set, on one thread and on all. Select with --benchmark_filter, for example Lamb/matrix/avx512.
#include <benchmark/benchmark.h>
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fusedstep/isa.h"
#include "fusedstep/rules/list.h"
#include "shape_lists.h"
#include "src/plan/placement.h"
#include "src/plan/plan.h"
#include "src/steps/step.h"

namespace fusedstep {
namespace {

// Weights, gradients and states of a shape list, bound to a plan and placed as the library places them.
class Operands {
 public:
  Operands(const ShapeList& shapes, int states, int threads)
      : plan_(shapes.elements.size(), states), steps_(shapes.elements.size(), 1.0) {
    for (size_t i = 0; i < shapes.elements.size(); ++i) {
      const int64_t& elements = shapes.elements[i];
      TensorOperands operands{filled(elements), filled(elements), {}};
      for (int k = 0; k < states; ++k) operands.states[k] = state(elements, operands.weight.data, k, states);
      plan_.bind(i, operands);
    }
    zero_states(plan_, threads);
  }

  void step(const BoundRule& rule, int threads) {
    run_step(plan_, rule, steps_, {.threads = threads, .grads = GradUse::kScratch});
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  static TensorView view(void* data, const int64_t& elements) {
    static constexpr int64_t kStride = 1;
    return {data, DType::kFloat, Dims(&elements, 1), Dims(&kStride, 1)};
  }

  char* allocate(int64_t bytes) {
    void* memory = std::aligned_alloc(kLine, (bytes + kLine - 1) / kLine * kLine);
    if (memory == nullptr) throw std::bad_alloc();
    memory_.emplace_back(memory);
    return static_cast<char*>(memory);
  }

  // Not zeros: without decay a gradient of zero would divide zero by zero.
  TensorView filled(const int64_t& elements) {
    auto* data = reinterpret_cast<float*>(allocate(elements * static_cast<int64_t>(sizeof(float))));
    std::fill_n(data, elements, 0.5f);
    return view(data, elements);
  }

  TensorView state(const int64_t& elements, const void* weight, int slot, int slots) {
    const int64_t bytes = elements * static_cast<int64_t>(sizeof(float));
    if (bytes < kPlacedBytes) return view(allocate(bytes), elements);
    char* data = allocate(bytes + kPage);
    ask_for_huge_pages(data, bytes + kPage);
    return view(data + placement_offset(data, weight, slot, slots), elements);
  }

  std::vector<std::unique_ptr<void, Free>> memory_;
  Plan plan_;
  std::vector<double> steps_;
};

// The operands of the benchmark that runs: one set at a time, since the largest take gigabytes.
Operands& operands_of(const ShapeList& shapes, int states) {
  static std::unique_ptr<Operands> operands;
  static std::pair<const ShapeList*, int> key;
  if (key != std::pair(&shapes, states)) {
    operands.reset();
    operands = std::make_unique<Operands>(shapes, states, omp_get_max_threads());
    key = {&shapes, states};
  }
  return *operands;
}

template <template <unsigned> class Rule>
void run(benchmark::State& state, const ShapeList& shapes, const std::string& isa, int threads) {
  constexpr int kStates = Rule<0>::kStates;
  Operands& operands = operands_of(shapes, kStates);
  force_isa(isa);
  // Time does not depend on the hyper-parameters: zeros leave the weights where they are.
  const BoundRule rule = bind_rule<Rule>(typename Rule<0>::Hyper{}, 0);
  operands.step(rule, threads);
  for (auto iteration : state) operands.step(rule, threads);

  int64_t elements = 0;
  for (const int64_t count : shapes.elements) elements += count;
  constexpr int64_t kMoves = 2 * (2 + kStates) - 1;  // all arrays are read, all but the gradient written
  state.SetItemsProcessed(state.iterations() * elements);
  state.SetBytesProcessed(state.iterations() * elements * kMoves * sizeof(float));
}

template <template <unsigned> class Rule>
void add(const std::string& rule) {
  for (const ShapeList& shapes : kShapeLists) {
    for (const std::string& isa : isas()) {
      for (const int threads : std::set{1, omp_get_max_threads()}) {
        std::string name = rule;
        name.append("/").append(shapes.name).append("/").append(isa);
        name.append("/threads:").append(std::to_string(threads));
        const auto body = [&shapes, isa, threads](benchmark::State& state) {
          run<Rule>(state, shapes, isa, threads);
        };
        benchmark::RegisterBenchmark(name.c_str(), body)->UseRealTime()->Unit(benchmark::kMicrosecond);
      }
    }
  }
}

}  // namespace
}  // namespace fusedstep

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
#define FUSEDSTEP_ADD(Rule) fusedstep::add<fusedstep::rules::Rule>(#Rule);
  FUSEDSTEP_RULES(FUSEDSTEP_ADD)
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
