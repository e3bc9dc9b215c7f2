// Options of the C++ optimizers: how a class declares its own, those that all have, and the checks of them.
#pragma once
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace fusedstep::optim {

// Declares the members of an optimizer's options, a detail::BasicOptions, from a list of X(type, name,
// default value), which has `lr`, and from another such list where one is given. The default value of several
// numbers is a list of them. Each option gets the members that TORCH_ARG declares. max_grad_norm limits
// the 2-norm of all gradients together, for the step alone; with kNoLimit no gradient is clipped. The
// constructor is a template, so that a program compiles the constructors of the classes that it uses alone.
#define FUSEDSTEP_OPTIONS(Options, LIST, ...)                                                   \
 public:                                                                                        \
  Options() = default;                                                                          \
  template <class = void> /* NOLINTNEXTLINE(google-explicit-constructor): as torch's options */ \
  Options(double lr) : lr_(lr) {}                                                               \
  LIST(FUSEDSTEP_DECLARE_OPTION)                                                                \
  __VA_OPT__(__VA_ARGS__(FUSEDSTEP_DECLARE_OPTION))                                             \
  FUSEDSTEP_STORAGE_OPTIONS(FUSEDSTEP_DECLARE_OPTION)                                           \
 public:                                                                                        \
  /* Calls visit(name, pointer to member) for each option but those of storage. */              \
  template <class Visit>                                                                        \
  static void for_each_option(const Visit& visit) {                                             \
    using Own = Options;                                                                        \
    LIST(FUSEDSTEP_VISIT_OPTION)                                                                \
    __VA_OPT__(__VA_ARGS__(FUSEDSTEP_VISIT_OPTION))                                             \
  }                                                                                             \
  template <class Visit>                                                                        \
  static void for_each_storage_option(const Visit& visit) {                                     \
    using Own = Options;                                                                        \
    FUSEDSTEP_STORAGE_OPTIONS(FUSEDSTEP_VISIT_OPTION)                                           \
  }
#define FUSEDSTEP_DECLARE_OPTION(type, name, ...) TORCH_ARG(type, name){__VA_ARGS__};
#define FUSEDSTEP_VISIT_OPTION(type, name, ...) visit(#name, &Own::name##_);

// The options that all optimizers have: how states and weights are stored. An archive has one only where it
// is set, that is, neither "" nor 0.
//   state_dtype      "int8", "int4", "fp8": states in codes. "float32": also beside 16-bit weights
//   master_weights   "float32", "split": the float32 value of a 16-bit weight is kept
//   rounding         "stochastic", "kahan": the other ways to keep it. "stochastic" rounds at random
//   seed             of these random numbers
// docs/small_states.md and docs/numerics.md have what each does: the classes of Python do the same.
#define FUSEDSTEP_STORAGE_OPTIONS(X)      \
  X(std::string, state_dtype, kNotSet)    \
  X(std::string, master_weights, kNotSet) \
  X(std::string, rounding, kNotSet)       \
  X(int64_t, seed, 0)

inline constexpr const char* kNotSet = "";

// Types and values of options that have commas in them, or are long.
using TwoBetas = std::tuple<double, double>;
using TwoNumbers = std::tuple<double, double>;
using ThreeBetas = std::tuple<double, double, double>;
inline constexpr double kNoLimit = std::numeric_limits<double>::infinity();

namespace detail {

// Throws c10::Error for an option out of its range, with torch's text. A name that is not here is that of a
// number of at least 0, or of several of any range.
inline void check_range(std::string_view name, double value) {
  if (name == "dampening" || name == "lambd" || name == "t0") return;  // any number
  if (name == "max_grad_norm" ? value > 0 : value >= 0) return;
  const std::string what = name == "lr"    ? "learning rate"
                           : name == "eps" ? "epsilon value"
                                           : std::string(name) + " value";
  TORCH_CHECK(false, "Invalid ", what, ": ", value);
}

template <class... Numbers>
void check_range(std::string_view name, const std::tuple<Numbers...>& values) {
  if (name != "betas") return;
  int index = 0;
  const auto check = [&](double beta) {
    TORCH_CHECK(0 <= beta && beta < 1, "Invalid beta parameter at index ", index, ": ", beta);
    ++index;
  };
  std::apply([&](Numbers... betas) { (check(betas), ...); }, values);
}

inline void check_range(std::string_view /*name*/, bool /*value*/) {}

inline bool is_set(const std::string& option) { return !option.empty(); }
inline bool is_set(int64_t option) { return option != 0; }

// Reads an option that older archives lack; it is then left alone.
template <class T>
void read_if_there(torch::serialize::InputArchive& archive, const char* name, T& option) {
  c10::IValue value;
  if (archive.try_read(name, value)) option = value.to<T>();
}

// What the options of all classes have: archives, checks and comparison. An option that an archive lacks
// stays as it is: later versions have more of them.
template <class Derived>
class BasicOptions : public torch::optim::OptimizerCloneableOptions<Derived> {
 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    const auto read = [&](const char* name, auto member) { read_if_there(archive, name, self().*member); };
    Derived::for_each_option(read);
    Derived::for_each_storage_option(read);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    const auto write = [&](const char* name, auto member) {
      archive.write(name, torch::IValue(self().*member));
    };
    Derived::for_each_option(write);
    Derived::for_each_storage_option([&](const char* name, auto member) {
      if (is_set(self().*member)) write(name, member);
    });
  }
  double get_lr() const override { return self().lr(); }
  void set_lr(const double lr) override { self().lr(lr); }

  static bool has_option(std::string_view option) {
    bool has = false;
    const auto look = [&](std::string_view name, auto /*member*/) { has |= name == option; };
    Derived::for_each_option(look);
    Derived::for_each_storage_option(look);
    return has;
  }

  void check_ranges() const {
    Derived::for_each_option([&](const char* name, auto member) { check_range(name, self().*member); });
  }

  // Gives each storage option that is not set the value that `others` has.
  void complete_storage(const Derived& others) {
    Derived::for_each_storage_option([&](const char* /*name*/, auto member) {
      if (!is_set(self().*member)) self().*member = others.*member;
    });
  }

  friend bool operator==(const Derived& a, const Derived& b) {
    bool are_equal = true;
    const auto compare = [&](const char* /*name*/, auto member) { are_equal &= a.*member == b.*member; };
    Derived::for_each_option(compare);
    Derived::for_each_storage_option(compare);
    return are_equal;
  }

 private:
  Derived& self() { return static_cast<Derived&>(*this); }
  const Derived& self() const { return static_cast<const Derived&>(*this); }
};

// The hyper-parameters of a rule as its operator takes them, in their order and, last, whether to maximize.
template <class Hyper>
std::vector<double> numbers(const Hyper& hyper, bool maximize) {
  constexpr size_t kCount = std::size(Hyper::kNames);
  static_assert(sizeof(Hyper) == kCount * sizeof(double));
  std::vector<double> values(kCount);
  std::memcpy(values.data(), &hyper, sizeof hyper);
  values.push_back(maximize);
  return values;
}

// The options of a group that say how states and weights are stored. It refers to them.
struct Storage {
  std::string_view state_dtype, master_weights, rounding;
  int64_t seed;

  bool keeps_values() const { return !(master_weights.empty() && rounding.empty()); }
};

// Throws c10::Error for options that are none, or exclude each other, in the words of Python's classes.
inline void check_storage(const Storage& storage) {
  const auto is_one_of = [](std::string_view value, const auto&... known) {
    return value.empty() || ((value == known) || ...);
  };
  TORCH_CHECK(is_one_of(storage.state_dtype, "float32", "int8", "int4", "fp8"),
              "state_dtype must be '', 'float32' or one of 'int8', 'int4', 'fp8', not '", storage.state_dtype,
              "'");
  TORCH_CHECK(is_one_of(storage.master_weights, "float32", "split"),
              "master_weights must be '', 'float32' or 'split', not '", storage.master_weights, "'");
  TORCH_CHECK(is_one_of(storage.rounding, "stochastic", "kahan"),
              "rounding must be '', 'stochastic' or 'kahan', not '", storage.rounding, "'");
  TORCH_CHECK(storage.master_weights.empty() || storage.rounding.empty(), "master_weights='",
              storage.master_weights, "' and rounding='", storage.rounding,
              "' exclude each other: each keeps what a 16-bit weight cannot hold");
  TORCH_CHECK(storage.seed >= 0, "seed must be an int from 0 to 2**63 - 1, not ", storage.seed);
}

template <class Options>
Storage storage_of(const Options& options) {
  const Storage storage{options.state_dtype(), options.master_weights(), options.rounding(), options.seed()};
  check_storage(storage);
  return storage;
}

}  // namespace detail
}  // namespace fusedstep::optim
