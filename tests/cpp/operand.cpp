#include "tests/cpp/operand.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

namespace fusedstep::test {
namespace {

std::vector<int> order_or_row_major(const std::vector<int>& order, size_t dims) {
  if (!order.empty()) return order;
  std::vector<int> row_major(dims);
  std::iota(row_major.begin(), row_major.end(), 0);
  return row_major;
}

// The first bytes of the pattern that is around and between elements. Kept, for a sanitizer makes every byte
// that is worked out anew an expense.
std::vector<std::byte> fill_pattern(size_t bytes) {
  static const std::vector<std::byte> period = [] {
    std::vector<std::byte> all(size_t{1} << 20);
    for (size_t position = 0; position < all.size(); ++position) {
      all[position] = static_cast<std::byte>(0xa5 ^ (position * 29));
    }
    return all;
  }();
  std::vector<std::byte> pattern(bytes);
  for (size_t begin = 0; begin < bytes; begin += period.size()) {
    std::memcpy(pattern.data() + begin, period.data(), std::min(bytes - begin, period.size()));
  }
  return pattern;
}

uint64_t mix(uint64_t x) {  // the finalizer of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

template <class T>
T read(const std::byte* from) {
  T x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <class T>
void write(std::byte* to, T x) {
  std::memcpy(to, &x, sizeof x);
}

// work(Word{}) for the unsigned integer of a dtype's size.
template <class Work>
auto with_word(DType dtype, Work work) {
  switch (element_size(dtype)) {
    case 2:
      return work(uint16_t{});
    case 4:
      return work(uint32_t{});
    default:
      return work(uint64_t{});
  }
}

// The nearest bfloat16, ties to even: a float32's upper half, rounded by what is cut off.
uint16_t to_bfloat16(double x) {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(x));
  const uint32_t kept = bits >> 16, cut = bits & 0xffff;
  if (std::isnan(x)) return 0x7fc0;
  const bool up = cut > 0x8000 || (cut == 0x8000 && (kept & 1) != 0);
  return static_cast<uint16_t>(kept + (up ? 1 : 0));
}

}  // namespace

Form dense(const Sizes& sizes, const std::vector<int>& order) {
  return slice(sizes, Sizes(sizes.size(), 0), Sizes(sizes.size(), 1), order);
}

Form slice(const Sizes& parent, const Sizes& start, const Sizes& step, const std::vector<int>& order) {
  Form form{Sizes(parent.size()), 0};
  int64_t stride = 1;
  const std::vector<int> outermost_first = order_or_row_major(order, parent.size());
  for (auto dim = outermost_first.rbegin(); dim != outermost_first.rend(); ++dim) {
    form.strides[*dim] = stride * step[*dim];
    form.offset += stride * start[*dim];
    stride *= std::max<int64_t>(parent[*dim], 1);
  }
  return form;
}

Form expanded(const Sizes& sizes, const std::vector<int>& dims, const std::vector<int>& order) {
  Sizes kept = sizes;
  for (const int dim : dims) kept[dim] = 1;
  Form form = dense(kept, order);
  for (const int dim : dims) form.strides[dim] = 0;
  return form;
}

double decode(DType dtype, const std::byte* from) {
  switch (dtype) {
    case DType::kFloat:
      return read<float>(from);
    case DType::kDouble:
      return read<double>(from);
    case DType::kBFloat16:
      return std::bit_cast<float>(static_cast<uint32_t>(read<uint16_t>(from)) << 16);
    case DType::kHalf:
      return static_cast<double>(read<_Float16>(from));
  }
  return 0;
}

void encode(DType dtype, double x, std::byte* to) {
  switch (dtype) {
    case DType::kFloat:
      return write(to, static_cast<float>(x));
    case DType::kDouble:
      return write(to, x);
    case DType::kBFloat16:
      return write(to, to_bfloat16(x));
    case DType::kHalf:
      return write(to, static_cast<_Float16>(x));
  }
}

Operand::Operand(DType dtype, Sizes sizes, const Form& form, int64_t margin)
    : dtype_(dtype), sizes_(std::move(sizes)), strides_(form.strides), first_(form.offset + margin) {
  std::vector<int64_t> offsets(
      std::accumulate(sizes_.begin(), sizes_.end(), int64_t{1}, std::multiplies<>()));
  int64_t end = first_, offset = first_;
  Sizes index(sizes_.size(), 0);
  for (int64_t& each : offsets) {
    each = offset;
    end = std::max(end, offset + 1);
    for (size_t d = sizes_.size(); d-- > 0;) {
      offset += strides_[d];
      if (++index[d] < sizes_[d]) break;
      offset -= sizes_[d] * strides_[d];
      index[d] = 0;
    }
  }
  offsets_ = std::make_shared<const std::vector<int64_t>>(std::move(offsets));
  bytes_ = fill_pattern((end + margin) * element_size(dtype));
}

TensorView Operand::view() {
  return {bytes_.data() + first_ * element_size(dtype_), dtype_, sizes_, strides_};
}

std::vector<double> Operand::values() const {
  std::vector<double> all(elements());
  for (int64_t i = 0; i < elements(); ++i) all[i] = get(i);
  return all;
}

void Operand::fill(uint64_t seed) {
  for (int64_t i = 0; i < elements(); ++i) set(i, number(seed, i));
}

int64_t Operand::first_difference(const Operand& other) const {
  return with_word(dtype_, [&]<class Word>(Word) -> int64_t {
    for (int64_t i = 0; i < elements(); ++i) {
      const bool same = read<Word>(at(i)) == read<Word>(other.at(i));
      if (!same && !(std::isnan(get(i)) && std::isnan(other.get(i)))) return i;
    }
    return -1;
  });
}

void Operand::copy_elements(const Operand& other) {
  with_word(dtype_, [&]<class Word>(Word) {
    for (int64_t i = 0; i < elements(); ++i) write(at(i), read<Word>(other.at(i)));
  });
}

bool Operand::fill_untouched() const {
  std::vector<std::byte> expected = fill_pattern(bytes_.size());
  with_word(dtype_, [&]<class Word>(Word) {
    for (const int64_t offset : *offsets_) {
      const auto begin = offset * static_cast<int64_t>(sizeof(Word));
      write(expected.data() + begin, read<Word>(bytes_.data() + begin));
    }
  });
  return expected == bytes_;
}

double number(uint64_t seed, int64_t i) {
  const uint64_t random = mix(mix(seed + 0x9e3779b97f4a7c15u) + static_cast<uint64_t>(i));
  const double magnitude = 0.25 + 1.75 * (static_cast<double>(random >> 12) * 0x1p-52);
  return (random & 1) != 0 ? -magnitude : magnitude;
}

}  // namespace fusedstep::test
