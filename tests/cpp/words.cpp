// Compiled once for each instruction set, as the kernels are.
#include "tests/cpp/words.h"

#include <utility>

#include "cpu_kernels/elementwise_coded.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {
namespace {

using test::Word;

template <class V, Word kWord, class T>
void run_word(const T* x, const T* y, T* result, int64_t count) {
  for (int64_t i = 0; i < count; i += V::size()) {
    store(result, i, test::word_of<kWord>(load<V>(x, i), load<V>(y, i)));
  }
}

template <class V, int... kWord>
constexpr void take_words(test::RunWord<typename V::Number> (&run)[test::kWords],
                          std::integer_sequence<int, kWord...>) {
  ((run[kWord] = run_word<V, static_cast<Word>(kWord), typename V::Number>), ...);
}

template <unsigned... kFlags>
constexpr test::Words all_words(std::integer_sequence<unsigned, kFlags...>) {
#define FUSEDSTEP_STRING_(x) #x
#define FUSEDSTEP_STRING(x) FUSEDSTEP_STRING_(x)
  test::Words words{.isa = FUSEDSTEP_STRING(FUSEDSTEP_ISA), .of_floats = {}, .of_doubles = {}, .plain = {}};
  constexpr std::make_integer_sequence<int, test::kWords> kEach;
  using Registers = Groups<float, float>;
  take_words<Pack<float>>(words.of_floats[0], kEach);
  take_words<typename Registers::Type<2>>(words.of_floats[1], kEach);
  take_words<typename Registers::Type<4>>(words.of_floats[2], kEach);
  take_words<Pack<double>>(words.of_doubles, kEach);
#define FUSEDSTEP_PLAIN(name, Weight, State)                                        \
  ((words.plain[static_cast<int>(Format::k##name)][kFlags] =                        \
        elementwise_kernels<rules::Plain<kFlags>, Weight, State>().phase[kUpdate]), \
   ...);
  FUSEDSTEP_FORMATS(FUSEDSTEP_PLAIN)
#undef FUSEDSTEP_PLAIN
  return words;
}

}  // namespace

extern const test::Words kWords =
    all_words(std::make_integer_sequence<unsigned, rules::Plain<0>::kFlagCombinations>());

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
