// Moves of weights along their gradients, each channel by a factor that norms in a low rank give
// (src/core/channels.h), on a CPU or a device.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu_kernels/matrix_passes.h"
#include "src/core/channels.h"
#include "src/core/matrix_passes.h"
#include "src/plan/tensor_view.h"
#include "src/run/load_balance.h"

namespace fusedstep {

// The weights of a list. A step binds its operands, which may fail; the passes that follow allocate nothing,
// and cannot fail on a CPU. Their bits do not depend on the number of threads.
class ChannelMoves {
 public:
  // The gradients and updates in a low rank: contiguous matrices that stay where they are.
  ChannelMoves(std::span<const TensorView> lows, std::span<const TensorView> updates,
               std::vector<Channels> channels);

  // Notes the operands of a step: matrices, numbers that are the last norms, and the factors that updates
  // have. Returns how many doubles of memory the step needs. These begin with a number for each channel of
  // all weights: the sums of squares of low-rank gradients, those of gradients, and those of updates. A
  // number for each weight follows, the square of the norm of the scaled gradient. Processes may add up
  // theirs between the pass that writes numbers and the next one.
  int64_t bind(std::span<const TensorView> grads, std::span<const TensorView> lasts,
               std::span<const double> lengths, int threads);
  // Notes the weights, for move(). None overlaps itself or another one.
  void bind_weights(std::span<const TensorView> weights);
  void use(double* memory);

  void sum_gradients();
  void sum_updates();
  void scale(const ScaleOptions& options);
  void limit(const LimitOptions& options);
  // Moves the bound weights [first, first + count).
  void move(size_t first, size_t count, double keep);
  // Moves another matrix in place of a weight, along the weight's gradient. It allocates before it writes.
  void move_onto(size_t index, const TensorView& weight, double keep);

  size_t weights() const { return channels_.size(); }
  int device() const { return device_; }
  DType dtype() const { return is_double_ ? DType::kDouble : DType::kFloat; }  // of low-rank gradients
  int64_t memory() const { return memory_; }                                   // as bind() has returned it
  // Returns whether a weight of this shape has the channels of its low-rank gradient.
  bool fits(size_t index, Dims sizes) const;
  bool has_weights() const { return moves_.size() == weights(); }

 private:
  // Parts of tensors that a thread works on at a time, in the order of the tensors.
  struct Parts {
    struct Part {
      size_t tensor;
      cpu::Tile tile;
    };
    std::vector<Part> all;
    std::vector<int64_t> cost{0}, first{0};  // the first part of each tensor and, last, the number of all
    LoadBalance balance;

    // Cuts the next tensor.
    void cut(int64_t rows, int64_t columns, int64_t rows_of_part, int64_t columns_of_part);
  };
  // The sums of squares of a list of matrices. Partial sums are added in a second stage.
  struct Sums {
    SquaresFormat format{};
    std::vector<SquaresTensor> tensors;
    Parts parts;
    std::vector<int64_t> cost_of_folds{0};

    int64_t partials() const;
  };
  // A bound gradient.
  struct Grad {
    const void* data;
    int64_t row_stride, column_stride;
  };

  Sums sums_of(std::span<const TensorView> matrices) const;
  void place(Sums& sums, double* found, double* partials) const;
  void sum(Sums& sums) const;
  MoveTensor move_of(size_t index, const TensorView& weight) const;
  Parts parts_of(std::span<const MoveTensor> moves) const;
  void run_moves(PassFormat format, std::span<const MoveTensor> moves, double keep, Parts& parts,
                 size_t first, size_t count) const;
  template <class Run>
  void run_weights(Run run);

  int device_, threads_ = 1;
  int64_t memory_ = 0;
  bool is_double_;
  std::vector<Channels> channels_;
  std::vector<int64_t> first_channel_{0};  // of each weight and, last, the number of all
  Sums lows_, updates_, grads_;
  DType dtype_of_grads_{};
  std::vector<Grad> bound_grads_;
  std::vector<ScaleTensor> scales_;
  LoadBalance balance_of_scales_;
  PassFormat format_{};
  std::vector<MoveTensor> moves_;
  Parts parts_of_moves_;
};

}  // namespace fusedstep
