// Compiled once for each rule of the list, which FUSEDSTEP_RULE names and FUSEDSTEP_RULE_HEADER has: every
// combination of its flags, for every format.
#include <array>
#include <utility>

#include "cuda_kernels/coded.cuh"
#include "cuda_kernels/one_chunk.cuh"
#include "cuda_kernels/rows.cuh"
#include FUSEDSTEP_RULE_HEADER

namespace fusedstep::cuda {
namespace {

// True if rows without a gradient may be left alone.
template <class Rule>
inline constexpr bool kTakesRows = false;
template <class Rule>
requires(Rule::kZeroGradChangesNothing) inline constexpr bool kTakesRows<Rule> = true;

template <Access kAccess, template <unsigned> class Rule, unsigned kFlags, class Weight, class State>
constexpr PassKernels kernels_of() {
  using R = Rule<kFlags>;
  PassKernels kernels{};
  if constexpr (std::is_same_v<State, float> && R::kStates > 0) {
    kernels.coded_states = coded_passes<kAccess, R, Weight, StatesIn::kCodes>();
  }
  if constexpr (StoredOf<Weight>::kHasMaster) {
    kernels.coded_weight = coded_passes<kAccess, R, Weight, StatesIn::kFloats>();
  }
  if constexpr (!kHasNorms<Rule<0>>) {
    kernels.update = launch_update<kAccess, R, Weight, State>;
    if constexpr (kTakesRows<R>) kernels.update_rows = launch_update_rows<kAccess, R, Weight, State>;
  } else if constexpr (kAccess == kInWords) {
    kernels.two_phases = launch_two_phases<Rule, kFlags, Weight, State>;
    kernels.one_chunk = launch_one_chunk<Rule, kFlags, Weight, State>;
  } else {
    kernels.accumulate = launch_accumulate<R, Weight, State>;
    kernels.apply_stored = launch_apply<Updates::kStored, R, Weight, State>;
    kernels.apply_recomputed = launch_apply<Updates::kRecomputed, R, Weight, State>;
  }
  return kernels;
}

template <template <unsigned> class Rule, unsigned kFlags>
constexpr RuleKernels formats_of() {
#define FUSEDSTEP_KERNELS(name, Weight, State)          \
  {kernels_of<kInWords, Rule, kFlags, Weight, State>(), \
   kernels_of<kByElement, Rule, kFlags, Weight, State>()},
  return {{FUSEDSTEP_FORMATS(FUSEDSTEP_KERNELS)}};
#undef FUSEDSTEP_KERNELS
}

// A warp of each block has a tensor a thread: powers in double are slow where several warps share a
// multiprocessor.
template <template <unsigned> class Rule>
__global__ void prepare_kernel(const __grid_constant__ PrepareLaunch launch) {
  using R = Rule<0>;  // scalars do not depend on the flags
  let_next_kernel_begin();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  if (threadIdx.x >= kWarp || i >= launch.tensor_count || left_out(launch.found_inf)) return;
  typename R::Hyper hyper;
  memcpy(static_cast<void*>(&hyper), &launch.hyper, sizeof hyper);
  if (launch.lr != nullptr) hyper.lr = static_cast<double>(*launch.lr);
  constexpr int kNumbers = 1 + static_cast<int>(rules::kNumbersOf<R>);
  double numbers[kMaxNumbers];
  for (int k = 0; k < kNumbers; ++k) numbers[k] = *launch.numbers[k * launch.tensor_count + i];
  numbers[0] = static_cast<float>(numbers[0]) + 1;  // in float32, which stands still at 2^24
  if (launch.draws != nullptr) {
    launch.draws[i] = key_of_step(launch.seed, static_cast<uint64_t>(numbers[0]));
  }
  constexpr bool kByStep = rules::rounds_by_step(R::kAllStates);
  launch.scalars[i].rounding = kByStep ? rounding_of_step(numbers[0]) : CodeMap::kToNearest;
  if (launch.tensors[i].as_double) {
    const auto scalars = rules::prepare<R, double>(hyper, numbers[0], numbers + 1);
    memcpy(&launch.scalars[i], &scalars, sizeof scalars);
  } else {
    const auto scalars = rules::prepare<R, float>(hyper, numbers[0], numbers + 1);
    memcpy(&launch.scalars[i], &scalars, sizeof scalars);
  }
  for (int k = 0; k < kNumbers; ++k) {
    *launch.numbers[k * launch.tensor_count + i] = static_cast<float>(numbers[k]);
  }
}

template <template <unsigned> class Rule>
void launch_prepare(const PrepareLaunch& launch) {
  const int64_t blocks = (launch.tensor_count + kWarp - 1) / kWarp;
  launch_blocks(prepare_kernel<Rule>, blocks, Queue{launch.stream}, launch);
}

template <template <unsigned> class Rule, unsigned... kFlags>
const RuleTable& make_table(std::integer_sequence<unsigned, kFlags...>) {
  static constexpr RuleKernels of_flags[] = {formats_of<Rule, kFlags>()...};
  if constexpr (kHasNorms<Rule<0>>) {
    static constexpr RuleTable table{of_flags, launch_prepare<Rule>, launch_ratio<Rule>};
    return table;
  } else {
    static constexpr RuleTable table{of_flags, launch_prepare<Rule>, nullptr};
    return table;
  }
}

}  // namespace

template <>
const RuleTable& table_of<rules::FUSEDSTEP_RULE>() {
  constexpr unsigned kCombinations = rules::FUSEDSTEP_RULE<0>::kFlagCombinations;
  return make_table<rules::FUSEDSTEP_RULE>(std::make_integer_sequence<unsigned, kCombinations>{});
}

}  // namespace fusedstep::cuda
