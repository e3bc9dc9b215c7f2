// Tensors for tests: each operand in a buffer of its own, a fill pattern around and between its elements.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "src/plan/plan.h"

namespace fusedstep::test {

using Sizes = std::vector<int64_t>;

// The offsets of a tensor's elements in its buffer, in elements.
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
double decode(DType dtype, const unsigned char* from);
void encode(DType dtype, double x, unsigned char* to);

// The places of a tensor's elements in a buffer, in elements. Operands of the same form share them.
struct Places {
  std::vector<int64_t> offsets;                   // in row-major order
  std::vector<std::pair<int64_t, int64_t>> gaps;  // places of no element, before the end of the last one
  int64_t end = 0;                                // behind the last element
  bool in_one_run = true;                         // element i is i places behind element 0
};

class Operand {
 public:
  // `margin` elements of fill before the first and after the last element.
  Operand(DType dtype, Sizes sizes, const Form& form, int64_t margin = 0);

  // Valid as long as this operand is neither moved nor destroyed.
  TensorView view();
  int64_t elements() const { return static_cast<int64_t>(places_->offsets.size()); }

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
  // The same for elements [begin, end).
  void copy_elements(const Operand& other, int64_t begin, int64_t end);
  // Makes all elements zero.
  void clear();

  // True if every byte that belongs to no element is as it was at first.
  bool fill_untouched() const;

  // The whole buffer, fill included. Not of std::byte, which libstdc++ compares one by one.
  const std::vector<unsigned char>& bytes() const { return bytes_; }

 private:
  unsigned char* at(int64_t i) { return bytes_.data() + places_->offsets[i] * element_size_; }
  const unsigned char* at(int64_t i) const { return bytes_.data() + places_->offsets[i] * element_size_; }

  DType dtype_;
  int64_t element_size_;
  Sizes sizes_, strides_;
  int64_t first_;  // place of element (0, ..., 0)
  std::shared_ptr<const Places> places_;
  std::vector<unsigned char> bytes_;
};

// A number that depends on `seed` and i only: of either sign, its magnitude in [1/4, 2).
double number(uint64_t seed, int64_t i);

}  // namespace fusedstep::test
