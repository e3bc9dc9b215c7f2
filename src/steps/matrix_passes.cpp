#include "src/steps/matrix_passes.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "src/core/channels.h"
#include "src/run/dispatch.h"
#include "src/run/session.h"

namespace fusedstep {
namespace {

// Elements of a tensor that a kernel goes through in one call, and of a matrix whose squares are one sum.
constexpr int64_t kPassElements = 4096, kNormElements = 16384;

// A part of a tensor's elements.
template <class Tensor>
struct Piece {
  const Tensor* tensor;
  int64_t begin, end;
};

// Cuts `count` elements of a tensor from number `first` on.
template <class Tensor>
void cut(const Tensor& tensor, int64_t first, int64_t count, int64_t most,
         std::vector<Piece<Tensor>>& pieces) {
  for (int64_t at = 0; at < count; at += most) {
    pieces.push_back({&tensor, first + at, first + std::min(at + most, count)});
  }
}

template <class Tensor>
std::vector<int64_t> costs(const std::vector<Piece<Tensor>>& pieces) {
  std::vector<int64_t> cost = {0};
  for (const Piece<Tensor>& piece : pieces) cost.push_back(cost.back() + piece.end - piece.begin);
  return cost;
}

// Calls run(tensor, begin, end) for pieces of all tensors.
template <class Tensor, class Run>
void run_pass(std::span<const Tensor> tensors, int threads, Run run) {
  std::vector<Piece<Tensor>> pieces;
  for (const Tensor& tensor : tensors) cut(tensor, 0, tensor.count, kPassElements, pieces);
  const std::vector<int64_t> cost = costs(pieces);
  auto run_some = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(*pieces[i].tensor, pieces[i].begin, pieces[i].end);
  };
  LoadBalance balance;  // nothing is learnt in one run, but idle threads take pieces of others
  run_session(threads, cost, run_some, {}, &balance);
}

float divisor_of(std::span<const float> sums, const NormOptions& options) {
  const float norm = std::sqrt(static_cast<float>(std::accumulate(sums.begin(), sums.end(), 0.0)));
  const auto eps = static_cast<float>(options.eps);
  // A comparison that is false for NaN: a norm that is NaN stays.
  return options.adds_eps ? norm + eps : (norm < eps ? eps : norm);
}

}  // namespace

void write_updates(PassFormat format, std::span<const PassTensor> tensors, const AverageOptions& options,
                   int threads) {
  const auto run = pass_kernels().passes[static_cast<int>(format)].update;
  run_pass(tensors, threads,
           [&](const PassTensor& tensor, int64_t begin, int64_t end) { run(tensor, options, begin, end); });
}

void advance_tensors(PassFormat format, std::span<const AdvanceTensor> tensors, const AdvanceOptions& options,
                     int threads) {
  const auto run = pass_kernels().passes[static_cast<int>(format)].advance;
  run_pass(tensors, threads, [&](const AdvanceTensor& tensor, int64_t begin, int64_t end) {
    run(tensor, options, begin, end);
  });
}

size_t norm_sums(std::span<const NormTensor> tensors) {
  size_t sums = 0;
  for (const NormTensor& tensor : tensors) sums += tensor.matrices * pieces_of(tensor.size, kNormElements);
  return sums;
}

void normalize_matrices(NormFormat format, std::span<const NormTensor> tensors, const NormOptions& options,
                        float* sums, int threads) {
  const cpu::NormKernels& run = pass_kernels().norms[static_cast<int>(format)];
  std::vector<Piece<NormTensor>> pieces;
  for (const NormTensor& tensor : tensors) {
    for (int64_t matrix = 0; matrix < tensor.matrices; ++matrix) {
      cut(tensor, matrix * tensor.size, tensor.size, kNormElements, pieces);
    }
  }
  const auto sum = [&](int64_t i) {
    sums[i] = run.sum_squares(*pieces[i].tensor, pieces[i].begin, pieces[i].end);
  };
  const auto divide = [&](int64_t i) {
    const auto& [tensor, begin, end] = pieces[i];
    const int64_t first = i - begin % tensor->size / kNormElements;
    const std::span of_matrix(sums + first, pieces_of(tensor->size, kNormElements));
    run.divide(*tensor, divisor_of(of_matrix, options), begin, end);
  };
  const std::vector<int64_t> cost = costs(pieces);
  const Stage stages[] = {{cost}, {cost, true}};
  auto run_stage = [&](size_t stage, Pieces& mine) {
    for (int64_t begin, end; mine.next(begin, end);) {
      for (int64_t i = begin; i < end; ++i) stage == 0 ? sum(i) : divide(i);
    }
  };
  LoadBalance balance;
  run_stages(threads, stages, run_stage, {}, &balance);
}

}  // namespace fusedstep
