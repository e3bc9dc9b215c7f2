// Numbers in memory that begins some elements behind an aligned address, with a margin on both sides.
#pragma once
#include <cstdint>
#include <random>
#include <vector>

namespace fusedstep::test {

// `As`: the type in memory, As::Stored; As::put() makes a number of this type, and As::get() reads one.
template <class As>
struct Numbers {
  static constexpr int64_t kMargin = 8;
  int64_t begin;
  std::vector<typename As::Stored> all;

  Numbers(int64_t count, int64_t shift, std::mt19937_64& random)
      : begin(kMargin + shift), all(count + 2 * kMargin + shift) {
    std::uniform_real_distribution<double> numbers(-1, 1);
    for (auto& x : all) x = As::put(static_cast<decltype(As::get(x))>(numbers(random)));
  }
  auto* data() { return all.data() + begin; }
  const auto* data() const { return all.data() + begin; }
  auto get(int64_t i) const { return As::get(data()[i]); }
  void put(int64_t i, float x) { data()[i] = As::put(x); }
};

}  // namespace fusedstep::test
