// Tensors for tests: each operand in a buffer of its own, a fill pattern around and between its elements.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "src/plan.h"

namespace fusedstep::test {

using Sizes = std::vector<int64_t>;

// Where a tensor's elements are in its buffer, in elements.
struct Form {
  Sizes strides;
  int64_t offset = 0;
};

// Dense; `order` lists the dimensions, outermost in memory first (none given: row-major).
Form dense(const Sizes& sizes, const std::vector<int>& order = {});

// A slice of a dense parent: from `start` on, every `step`-th.
Form slice(const Sizes& parent, const Sizes& start, const Sizes& step, const std::vector<int>& order = {});

// Dense over the dimensions not listed, stride 0 along those that are.
Form expanded(const Sizes& sizes, const std::vector<int>& dims, const std::vector<int>& order = {});

// One number of a dtype.
double decode(DType dtype, const std::byte* from);
void encode(DType dtype, double x, std::byte* to);

class Operand {
 public:
  // `margin` elements of fill before the first and after the last element.
  Operand(DType dtype, Sizes sizes, const Form& form, int64_t margin = 0);

  // Valid as long as this operand is neither moved nor destroyed.
  TensorView view();
  int64_t elements() const { return static_cast<int64_t>(offsets_->size()); }

  // Element i in row-major order.
  double get(int64_t i) const { return decode(dtype_, at(i)); }
  void set(int64_t i, double x) { encode(dtype_, x, at(i)); }
  std::vector<double> values() const;

  // Gives element i number(seed, i).
  void fill(uint64_t seed);
  // The first element whose bits are not those of `other`'s, a NaN being like any other; -1 if there is none.
  int64_t first_difference(const Operand& other) const;
  // Gives the elements the values of another operand's.
  void copy_elements(const Operand& other);

  // True if every byte that belongs to no element is as it was at first.
  bool fill_untouched() const;

  // The whole buffer, fill included.
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::byte* at(int64_t i) { return bytes_.data() + (*offsets_)[i] * element_size(dtype_); }
  const std::byte* at(int64_t i) const { return bytes_.data() + (*offsets_)[i] * element_size(dtype_); }

  DType dtype_;
  Sizes sizes_, strides_;
  std::shared_ptr<const std::vector<int64_t>>
      offsets_;    // of elements in row-major order, from the buffer's start
  int64_t first_;  // of element (0, ..., 0)
  std::vector<std::byte> bytes_;
};

// A number that depends on `seed` and i only: of either sign, its magnitude in [1/4, 2).
double number(uint64_t seed, int64_t i);

}  // namespace fusedstep::test
