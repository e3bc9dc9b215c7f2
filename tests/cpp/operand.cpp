#include "tests/cpp/operand.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <tuple>

namespace fusedstep::test {
namespace {

std::vector<int> order_or_row_major(const std::vector<int>& order, size_t dims) {
  if (!order.empty()) return order;
  std::vector<int> row_major(dims);
  std::iota(row_major.begin(), row_major.end(), 0);
  return row_major;
}

// The pattern around and between elements. It repeats itself every 256 bytes.
constexpr size_t kPatternBytes = size_t{1} << 20;

const unsigned char* pattern() {
  static const std::vector<unsigned char> all = [] {
    std::vector<unsigned char> bytes(kPatternBytes);
    for (size_t position = 0; position < bytes.size(); ++position) {
      bytes[position] = static_cast<unsigned char>(0xa5 ^ (position * 29));
    }
    return bytes;
  }();
  return all.data();
}

std::vector<unsigned char> fill_pattern(size_t bytes) {
  std::vector<unsigned char> filled(bytes);
  for (size_t begin = 0; begin < bytes; begin += kPatternBytes) {
    std::memcpy(filled.data() + begin, pattern(), std::min(bytes - begin, kPatternBytes));
  }
  return filled;
}

// True if bytes [begin, end) of a buffer are the pattern's.
bool is_pattern(const unsigned char* buffer, size_t begin, size_t end) {
  while (begin < end) {
    const size_t from = begin % kPatternBytes, bytes = std::min(end - begin, kPatternBytes - from);
    if (std::memcmp(buffer + begin, pattern() + from, bytes) != 0) return false;
    begin += bytes;
  }
  return true;
}

uint64_t mix(uint64_t x) {  // the finalizer of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

template <class T>
T read(const unsigned char* from) {
  T x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <class T>
void write(unsigned char* to, T x) {
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

// Sets elements [begin, end) of a buffer to what `word_of` returns for each. The pointers are the function's
// own: a write to the buffer leaves them in registers.
template <class WordOf>
void set_words(DType dtype, unsigned char* bytes, const int64_t* offsets, int64_t begin, int64_t end,
               WordOf word_of) {
  with_word(dtype, [=]<class Word>(Word word) {
    for (int64_t i = begin; i < end; ++i) write(bytes + offsets[i] * sizeof(Word), word_of(word, i));
  });
}

// The nearest bfloat16, ties to even: a float32's upper half, rounded by what is cut off.
uint16_t to_bfloat16(double x) {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(x));
  const uint32_t kept = bits >> 16, cut = bits & 0xffff;
  if (std::isnan(x)) return 0x7fc0;
  const bool up = cut > 0x8000 || (cut == 0x8000 && (kept & 1) != 0);
  return static_cast<uint16_t>(kept + (up ? 1 : 0));
}

Places make_places(const Sizes& sizes, const Sizes& strides, int64_t first) {
  Places places;
  places.offsets.resize(std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>()));
  places.end = first;
  int64_t offset = first;
  Sizes index(sizes.size(), 0);
  for (int64_t& each : places.offsets) {
    each = offset;
    places.end = std::max(places.end, offset + 1);
    places.in_one_run = places.in_one_run && offset - first == &each - places.offsets.data();
    for (size_t d = sizes.size(); d-- > 0;) {
      offset += strides[d];
      if (++index[d] < sizes[d]) break;
      offset -= sizes[d] * strides[d];
      index[d] = 0;
    }
  }
  std::vector<char> is_taken(places.end);
  for (const int64_t each : places.offsets) is_taken[each] = 1;
  for (auto at = is_taken.begin(); at != is_taken.end();) {
    const auto begin = std::find(at, is_taken.end(), 0);
    at = std::find(begin, is_taken.end(), 1);
    if (begin != at) places.gaps.emplace_back(begin - is_taken.begin(), at - is_taken.begin());
  }
  return places;
}

// Values that are kept, since tests make the same operands many times. All go once their sizes are too much.
template <class Key, class Value>
class Kept {
 public:
  explicit Kept(size_t most) : most_(most) {}

  // The value of a key; `make` returns it where it is not kept yet.
  template <class Make>
  const Value& get(const Key& key, size_t size, Make make) {
    const auto found = values_.find(key);
    if (found != values_.end()) return found->second;
    if (size_ + size > most_) {
      values_.clear();
      size_ = 0;
    }
    size_ += size;
    return values_.emplace(key, make()).first->second;
  }

 private:
  std::map<Key, Value> values_;
  size_t most_, size_ = 0;
};

std::shared_ptr<const Places> places_of(const Sizes& sizes, const Sizes& strides, int64_t first) {
  thread_local Kept<std::tuple<Sizes, Sizes, int64_t>, std::shared_ptr<const Places>> kept(size_t{1} << 22);
  const int64_t elements = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return kept.get({sizes, strides, first}, elements,
                  [&] { return std::make_shared<const Places>(make_places(sizes, strides, first)); });
}

// The first numbers of a seed, in a dtype.
const unsigned char* numbers_of(DType dtype, uint64_t seed, int64_t count) {
  // More than is asked for: another operand may want them.
  const auto kept_count = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(count)));
  thread_local Kept<std::tuple<DType, uint64_t, int64_t>, std::vector<unsigned char>> kept(size_t{1} << 26);
  const auto size = static_cast<int64_t>(element_size(dtype));
  return kept
      .get({dtype, seed, kept_count}, kept_count * size,
           [&] {
             std::vector<unsigned char> numbers(kept_count * size);
             for (int64_t i = 0; i < kept_count; ++i)
               encode(dtype, number(seed, i), numbers.data() + i * size);
             return numbers;
           })
      .data();
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

double decode(DType dtype, const unsigned char* from) {
  switch (dtype) {
    case DType::kFloat:
      return read<float>(from);
    case DType::kDouble:
      return read<double>(from);
    case DType::kBFloat16:
      return std::bit_cast<float>(static_cast<uint32_t>(read<uint16_t>(from)) << 16);
    case DType::kHalf:
      return static_cast<double>(read<_Float16>(from));
    case DType::kInt16:
      return read<int16_t>(from);
    default:  // codes of states, which are no operands
      return 0;
  }
}

void encode(DType dtype, double x, unsigned char* to) {
  switch (dtype) {
    case DType::kFloat:
      return write(to, static_cast<float>(x));
    case DType::kDouble:
      return write(to, x);
    case DType::kBFloat16:
      return write(to, to_bfloat16(x));
    case DType::kHalf:
      return write(to, static_cast<_Float16>(x));
    case DType::kInt16:
      return write(to, static_cast<int16_t>(x));
    default:
      return;
  }
}

Operand::Operand(DType dtype, Sizes sizes, const Form& form, int64_t margin)
    : dtype_(dtype),
      element_size_(static_cast<int64_t>(element_size(dtype))),
      sizes_(std::move(sizes)),
      strides_(form.strides),
      first_(form.offset + margin),
      places_(places_of(sizes_, strides_, first_)),
      bytes_(fill_pattern((places_->end + margin) * element_size_)) {}

TensorView Operand::view() { return {bytes_.data() + first_ * element_size_, dtype_, sizes_, strides_}; }

std::vector<double> Operand::values() const {
  std::vector<double> all(elements());
  for (int64_t i = 0; i < elements(); ++i) all[i] = get(i);
  return all;
}

void Operand::fill(uint64_t seed) {
  const unsigned char* numbers = numbers_of(dtype_, seed, elements());
  if (elements() == 0) return;
  if (places_->in_one_run) {
    std::memcpy(at(0), numbers, elements() * element_size_);
    return;
  }
  set_words(dtype_, bytes_.data(), places_->offsets.data(), 0, elements(),
            [=]<class Word>(Word, int64_t i) { return read<Word>(numbers + i * sizeof(Word)); });
}

int64_t Operand::first_difference(const Operand& other) const {
  if (places_ == other.places_ && bytes_ == other.bytes_) return -1;
  const unsigned char *bytes = bytes_.data(), *others = other.bytes_.data();
  const int64_t *offsets = places_->offsets.data(), *others_offsets = other.places_->offsets.data();
  return with_word(dtype_, [=, this, &other]<class Word>(Word) -> int64_t {
    for (int64_t i = 0, count = elements(); i < count; ++i) {
      const bool same = read<Word>(bytes + offsets[i] * sizeof(Word)) ==
                        read<Word>(others + others_offsets[i] * sizeof(Word));
      if (!same && !(std::isnan(get(i)) && std::isnan(other.get(i)))) return i;
    }
    return -1;
  });
}

void Operand::copy_elements(const Operand& other) { copy_elements(other, 0, elements()); }

void Operand::copy_elements(const Operand& other, int64_t begin, int64_t end) {
  if (begin == end) return;
  if (places_->in_one_run && other.places_->in_one_run) {
    std::memcpy(at(begin), other.at(begin), (end - begin) * element_size_);
    return;
  }
  const unsigned char* bytes = other.bytes_.data();
  const int64_t* offsets = other.places_->offsets.data();
  set_words(dtype_, bytes_.data(), places_->offsets.data(), begin, end,
            [=]<class Word>(Word, int64_t i) { return read<Word>(bytes + offsets[i] * sizeof(Word)); });
}

void Operand::clear() {
  if (elements() != 0 && places_->in_one_run) {
    std::memset(at(0), 0, elements() * element_size_);
    return;
  }
  set_words(dtype_, bytes_.data(), places_->offsets.data(), 0, elements(),
            []<class Word>(Word, int64_t) { return Word{}; });
}

bool Operand::fill_untouched() const {
  const auto is_untouched = [&](int64_t begin, int64_t end) {
    return is_pattern(bytes_.data(), begin * element_size_, end * element_size_);
  };
  return std::ranges::all_of(places_->gaps,
                             [&](const auto& gap) { return is_untouched(gap.first, gap.second); }) &&
         is_untouched(places_->end, std::ssize(bytes_) / element_size_);
}

double number(uint64_t seed, int64_t i) {
  const uint64_t random = mix(mix(seed + 0x9e3779b97f4a7c15u) + static_cast<uint64_t>(i));
  const double magnitude = 0.25 + 1.75 * (static_cast<double>(random >> 12) * 0x1p-52);
  return (random & 1) != 0 ? -magnitude : magnitude;
}

}  // namespace fusedstep::test
