// Moves of weights along their gradients by factors of channels (src/steps/channel_moves.h), for the low-rank
// gradients and updates of a plan. Operators of a step that take no tensor allocate nothing on a CPU.
#include "src/steps/channel_moves.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "src/ops/native_plan.h"
#include "src/plan/operand_checks.h"
#include "src/plan/overlap.h"

namespace fusedstep::ops {
namespace {

ChannelMoves& moves_of(NativePlan& native) {
  check(native.moves != nullptr, "the plan has no moves by channels");
  return *native.moves;
}

// Throws std::runtime_error unless there is one for each weight, with its channels, all of one dtype.
void check_matrices(const std::vector<TensorView>& found, const ChannelMoves& moves, const char* what) {
  bool fit = found.size() == moves.weights();
  for (size_t i = 0; fit && i < found.size(); ++i) {
    fit = moves.fits(i, found[i].sizes) && found[i].dtype == found[0].dtype &&
          found[i].device == moves.device();
  }
  check(fit, std::string(what) +
                 " must be matrices of one dtype with the channels of low-rank gradients, on "
                 "their device");
}

void plan_channels(int64_t plan, const Tensors& lows, const Tensors& updates,
                   const std::vector<int64_t>& channels) {
  const std::shared_ptr<NativePlan> native = find_plan(plan);
  const size_t count = native->plan.tensors();
  const std::vector<TensorView> low = views(lows, "low-rank gradient"), update = views(updates, "update");
  check(low.size() == count && update.size() == count && channels.size() == count,
        "lists must have an entry for each tensor of the plan");
  std::vector<Channels> known;
  for (size_t i = 0; i < count; ++i) {
    for (const TensorView* const each : {&low[i], &update[i]}) {
      check(each->sizes.size() == 2 && std::ranges::equal(each->sizes, low[i].sizes) &&
                is_in_order(each->sizes, each->strides) && each->dtype == low[0].dtype &&
                (each->dtype == DType::kFloat || each->dtype == DType::kDouble) &&
                each->device == native->plan.device(),
            "low-rank gradients and updates must be contiguous matrices of the same shapes, all float32 or "
            "float64, on the device of the plan");
    }
    check(channels[i] >= 0 && channels[i] <= static_cast<int64_t>(Channels::kWhole),
          "channels are rows (0), columns (1), or the whole matrix (2)");
    known.push_back(static_cast<Channels>(channels[i]));
  }
  native->moves = std::make_unique<ChannelMoves>(low, update, std::move(known));
}

void check_apart(const std::vector<TensorView>& weights) {
  std::vector<Elements> elements;
  for (size_t i = 0; i < weights.size(); ++i) {
    check_no_overlap(i, "the weight", weights[i].sizes, weights[i].strides);
    elements.push_back(elements_in_memory(weights[i]));
  }
  check_none_shared(elements);
}

// Returns how many float64 numbers of memory the step needs.
int64_t channels_bind(int64_t plan, const Tensors& grads, const Tensors& lasts,
                      const std::vector<double>& lengths) {
  const std::shared_ptr<NativePlan> native = find_plan(plan);
  check_idle(*native);
  ChannelMoves& moves = moves_of(*native);
  const std::vector<TensorView> grad = views(grads, "gradient"), last = views(lasts, "last norm");
  check_matrices(grad, moves, "gradients");
  check(last.size() == moves.weights() && lengths.size() == moves.weights(),
        "lists must have an entry for each weight");
  for (const TensorView& norm : last) {
    check(elements_of(norm.sizes) == 1 && norm.dtype == moves.dtype() && norm.device == moves.device(),
          "a last norm must be one number of the updates' dtype, on their device");
  }
  return moves.bind(grad, last, lengths, num_threads());
}

// For channels_move. To be called between channels_bind and channels_sum_gradients.
void channels_bind_weights(int64_t plan, const Tensors& weights) {
  ChannelMoves& moves = moves_of(*find_plan(plan));
  const std::vector<TensorView> weight = views(weights, "weight");
  check_matrices(weight, moves, "weights");
  check_apart(weight);
  moves.bind_weights(weight);
}

void channels_sum_gradients(int64_t plan, const Tensor& memory) {
  ChannelMoves& moves = moves_of(*find_plan(plan));
  const TensorView room = view(memory, "memory");
  check(room.dtype == DType::kDouble && room.device == moves.device() &&
            is_in_order(room.sizes, room.strides) && elements_of(room.sizes) >= moves.memory(),
        "memory must be contiguous float64, as much as channels_bind says, on the device of the weights");
  moves.use(static_cast<double*>(room.data));
  moves.sum_gradients();
}

void channels_sum_updates(int64_t plan) { moves_of(*find_plan(plan)).sum_updates(); }

void channels_scale(int64_t plan, double factor, double epsilon) {
  moves_of(*find_plan(plan)).scale({factor, epsilon});
}

void channels_limit(int64_t plan, bool limits, bool in_front, double root, double growth, double epsilon,
                    double times) {
  moves_of(*find_plan(plan)).limit({limits, in_front, root, growth, epsilon, times});
}

// Moves `count` weights from number `first` on.
void channels_move(int64_t plan, int64_t first, int64_t count, double keep) {
  ChannelMoves& moves = moves_of(*find_plan(plan));
  const auto all = moves.has_weights() ? static_cast<int64_t>(moves.weights()) : 0;
  check(first >= 0 && count >= 0 && first <= all && count <= all - first, "there are no such weights");
  moves.move(static_cast<size_t>(first), static_cast<size_t>(count), keep);
}

// Moves a matrix in place of weight `index`.
void channels_move_onto(int64_t plan, int64_t index, const Tensor& weight, double keep) {
  ChannelMoves& moves = moves_of(*find_plan(plan));
  check(index >= 0 && index < static_cast<int64_t>(moves.weights()), "there is no such weight");
  const TensorView found = view(weight, "weight");
  check(found.device == moves.device() && moves.fits(index, found.sizes),
        "the matrix must have the shape of the weight, and be on its device");
  moves.move_onto(static_cast<size_t>(index), found, keep);
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def("plan_channels(int plan, Tensor[] lows, Tensor[] updates, int[] channels) -> ()");
  m.def("channels_bind(int plan, Tensor[] grads, Tensor[] lasts, float[] lengths) -> int");
  m.def("channels_bind_weights(int plan, Tensor(a!)[] weights) -> ()");
  m.def("channels_sum_gradients(int plan, Tensor(a!) memory) -> ()");
  m.def("channels_sum_updates(int plan) -> ()");
  m.def("channels_scale(int plan, float factor, float epsilon) -> ()");
  m.def(
      "channels_limit(int plan, bool limits, bool in_front, float root, float growth, float epsilon, "
      "float times) -> ()");
  m.def("channels_move(int plan, int first, int count, float keep) -> ()");
  m.def("channels_move_onto(int plan, int index, Tensor(a!) weight, float keep) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fusedstep, CompositeExplicitAutograd, m) {
  m.impl("channels_sum_updates", TORCH_BOX(&channels_sum_updates));
  m.impl("channels_scale", TORCH_BOX(&channels_scale));
  m.impl("channels_limit", TORCH_BOX(&channels_limit));
  m.impl("channels_move", TORCH_BOX(&channels_move));
}

#define FUSEDSTEP_CHANNELS(m)                                           \
  m.impl("plan_channels", TORCH_BOX(&plan_channels));                   \
  m.impl("channels_bind", TORCH_BOX(&channels_bind));                   \
  m.impl("channels_bind_weights", TORCH_BOX(&channels_bind_weights));   \
  m.impl("channels_sum_gradients", TORCH_BOX(&channels_sum_gradients)); \
  m.impl("channels_move_onto", TORCH_BOX(&channels_move_onto))

STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) { FUSEDSTEP_CHANNELS(m); }
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CUDA, m) { FUSEDSTEP_CHANNELS(m); }
#undef FUSEDSTEP_CHANNELS

}  // namespace
}  // namespace fusedstep::ops
