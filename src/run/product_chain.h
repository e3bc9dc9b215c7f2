// Packings and products of matrices in stages, each of which needs what the stages before have written.
#pragma once
#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "cpu_kernels/products.h"

namespace fusedstep {

class ProductChain {
 public:
  using Task = std::variant<cpu::Packing, cpu::Product, cpu::WidePacking, cpu::WideProduct, cpu::RowFactors,
                            cpu::Scaling>;

  // Adds a task over so many matrices to a stage. Tasks of one stage write nothing that another task of the
  // stage reads or writes.
  void add(size_t stage, int64_t matrices, const Task& task);

  // Runs all stages on up to `threads` threads, with a barrier between two. The bits of results do not depend
  // on their number: one thread computes a block, and sums in the order of the depth. Allocates before the
  // first stage begins.
  void run(const cpu::ProductKernels& kernels, int threads) const;

 private:
  struct Part {
    Task task;
    int64_t matrices;
  };
  std::vector<std::vector<Part>> stages_;
};

}  // namespace fusedstep
