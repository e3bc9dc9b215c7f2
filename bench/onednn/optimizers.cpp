#include "bench/onednn/optimizers.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>
#include <unordered_map>
#include <vector>

namespace fusedstep::onednn {
namespace {

using dnnl::algorithm;
using dnnl::memory;

// Sums are taken by rows: one long sum in floats would lose digits.
constexpr int64_t kRow = 4096;

enum class Kind { kAdagrad, kAdam, kLamb };

struct Device {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
};

memory::desc flat(int64_t elements) { return {{elements}, memory::data_type::f32, memory::format_tag::a}; }

memory::desc matrix(int64_t rows, int64_t columns) {
  return {{rows, columns}, memory::data_type::f32, memory::format_tag::ab};
}

// One number that changes from step to step.
class Scalar {
 public:
  explicit Scalar(const dnnl::engine& engine) : memory_(flat(1), engine) {}
  void set(double value) { *static_cast<float*>(memory_.get_data_handle()) = static_cast<float>(value); }
  const dnnl::memory& get() const { return memory_; }

 private:
  dnnl::memory memory_;
};

// The primitives that all steps are put together from, for tensors of one size. Binary ones with
// post-operations: the only kind that has fast kernels for each of these.
class Primitives {
 public:
  Primitives(const dnnl::engine& engine, int64_t elements, const fusedstep_onednn_hyper& hyper)
      : engine_(engine), elements_(elements) {
    const auto scaled = [](double scale) {
      dnnl::post_ops ops;
      ops.append_sum(static_cast<float>(scale));
      return ops;
    };
    square = binary(algorithm::binary_mul, elements, {});
    add_square = binary(algorithm::binary_mul, elements, scaled(1));
    moment = binary(algorithm::binary_mul, 1, scaled(hyper.beta1));
    add_scaled = binary(algorithm::binary_mul, 1, scaled(1));

    dnnl::post_ops decayed;
    decayed.append_eltwise(algorithm::eltwise_linear, static_cast<float>(1 - hyper.beta2), 0);
    decayed.append_sum(static_cast<float>(hyper.beta2));
    second_moment = binary(algorithm::binary_mul, elements, decayed);

    dnnl::post_ops root;
    root.append_eltwise(algorithm::eltwise_sqrt, 0, 0);
    root.append_eltwise(algorithm::eltwise_linear, 1, static_cast<float>(hyper.eps));
    scaled_root = binary(algorithm::binary_mul, 1, root);

    dnnl::post_ops times_scalar;
    times_scalar.append_binary(algorithm::binary_mul, flat(1));
    quotient = binary(algorithm::binary_div, elements, times_scalar);
    times_scalar.append_sum(1);
    add_quotient = binary(algorithm::binary_div, elements, times_scalar);

    if (rows() > 0) sum_rows_ = row_sum(rows(), kRow);
    if (rest() > 0) sum_rest_ = row_sum(1, rest());
  }

  // dst = src0 · src0;  dst += src0 · src0
  dnnl::binary square, add_square;
  // dst = beta1 dst + scalar src0;  dst += scalar src0;  dst = sqrt(scalar src0) + eps
  dnnl::binary moment, add_scaled, scaled_root;
  // dst = beta2 dst + (1 - beta2) src0 · src0
  dnnl::binary second_moment;
  // dst = scalar src0 / src1;  dst += scalar src0 / src1
  dnnl::binary quotient, add_quotient;

  // The sum of `values`, by way of `partials`: rows in floats, over the rows in double.
  double sum(const dnnl::stream& stream, float* values, std::vector<float>& partials) const {
    partials.resize(rows() + 1);
    const auto run = [&](const dnnl::reduction& primitive, int64_t count, int64_t length, float* from,
                         float* to) {
      primitive.execute(stream, {{DNNL_ARG_SRC, memory(matrix(count, length), engine_, from)},
                                 {DNNL_ARG_DST, memory(matrix(count, 1), engine_, to)}});
    };
    if (rows() > 0) run(sum_rows_, rows(), kRow, values, partials.data());
    partials.back() = 0;
    if (rest() > 0) run(sum_rest_, 1, rest(), values + rows() * kRow, &partials.back());
    return std::accumulate(partials.begin(), partials.end(), 0.0);
  }

 private:
  int64_t rows() const { return elements_ / kRow; }
  int64_t rest() const { return elements_ % kRow; }

  dnnl::binary binary(algorithm what, int64_t second_elements, const dnnl::post_ops& then) const {
    dnnl::primitive_attr attributes;
    attributes.set_post_ops(then);
    const memory::desc all = flat(elements_);
    return dnnl::binary(
        dnnl::binary::primitive_desc(engine_, what, all, flat(second_elements), all, attributes));
  }

  dnnl::reduction row_sum(int64_t count, int64_t length) const {
    return dnnl::reduction(dnnl::reduction::primitive_desc(engine_, algorithm::reduction_sum,
                                                           matrix(count, length), matrix(count, 1), 0, 0));
  }

  dnnl::engine engine_;
  int64_t elements_;
  dnnl::reduction sum_rows_, sum_rest_;
};

struct Tensor {
  const Primitives* primitives;
  memory weight, grad, state[2];
  memory scratch[2];
};

class Optimizer {
 public:
  Optimizer(Kind kind, const fusedstep_onednn_hyper& hyper, int64_t tensors, const int64_t* elements,
            float* const* operands)
      : kind_(kind), hyper_(hyper), scratch_(2 * *std::max_element(elements, elements + tensors)) {
    const int states = kind == Kind::kAdagrad ? 1 : 2;
    for (int64_t i = 0; i < tensors; ++i, operands += 2 + states) {
      const int64_t count = elements[i];
      const auto wrap = [&](float* data) { return memory(flat(count), device_.engine, data); };
      const auto [found, added] = primitives_.try_emplace(count, device_.engine, count, hyper);
      Tensor tensor{&found->second, wrap(operands[0]), wrap(operands[1]), {}, {}};
      for (int k = 0; k < states; ++k) tensor.state[k] = wrap(operands[2 + k]);
      for (int k = 0; k < 2; ++k) tensor.scratch[k] = wrap(scratch_.data() + k * scratch_.size() / 2);
      tensors_.push_back(tensor);
    }
  }

  void step(double lr) {
    ++step_;
    const double bias1 = 1 - std::pow(hyper_.beta1, step_), bias2 = 1 - std::pow(hyper_.beta2, step_);
    gradient_share_.set(1 - hyper_.beta1);
    inverse_bias1_.set(1 / bias1);
    inverse_bias2_.set(1 / bias2);
    one_.set(1);
    for (const Tensor& tensor : tensors_) {
      switch (kind_) {
        case Kind::kAdagrad:
          adagrad(tensor, lr);
          break;
        case Kind::kAdam:
          adam(tensor, lr / bias1);
          break;
        case Kind::kLamb:
          lamb(tensor, lr);
          break;
      }
    }
    device_.stream.wait();
  }

 private:
  void run(const dnnl::binary& primitive, const memory& first, const memory& second, const memory& out,
           const Scalar* scalar = nullptr) const {
    std::unordered_map<int, memory> arguments{
        {DNNL_ARG_SRC_0, first}, {DNNL_ARG_SRC_1, second}, {DNNL_ARG_DST, out}};
    if (scalar != nullptr) {
      arguments.emplace(DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1, scalar->get());
    }
    primitive.execute(device_.stream, arguments);
  }

  // s = s + g^2;  p = p - lr g / (sqrt(s) + eps)
  void adagrad(const Tensor& t, double lr) {
    step_size_.set(-lr);
    run(t.primitives->add_square, t.grad, t.grad, t.state[0]);
    run(t.primitives->scaled_root, t.state[0], one_.get(), t.scratch[0]);
    run(t.primitives->add_quotient, t.grad, t.scratch[0], t.weight, &step_size_);
  }

  void moments(const Tensor& t) {
    run(t.primitives->moment, t.grad, gradient_share_.get(), t.state[0]);
    run(t.primitives->second_moment, t.grad, t.grad, t.state[1]);
    run(t.primitives->scaled_root, t.state[1], inverse_bias2_.get(), t.scratch[0]);
  }

  // p = p - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
  void adam(const Tensor& t, double step_size) {
    step_size_.set(-step_size);
    moments(t);
    run(t.primitives->add_quotient, t.state[0], t.scratch[0], t.weight, &step_size_);
  }

  // u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps);  p = p - lr |p| / |u| u
  void lamb(const Tensor& t, double lr) {
    moments(t);
    run(t.primitives->quotient, t.state[0], t.scratch[0], t.scratch[1], &inverse_bias1_);
    const double weight_norm2 = squared_norm(t, t.weight), update_norm2 = squared_norm(t, t.scratch[1]);
    const double ratio = weight_norm2 == 0 || update_norm2 == 0 ? 1 : std::sqrt(weight_norm2 / update_norm2);
    step_size_.set(-lr * ratio);
    run(t.primitives->add_scaled, t.scratch[1], step_size_.get(), t.weight);
  }

  double squared_norm(const Tensor& t, const memory& values) {
    run(t.primitives->square, values, values, t.scratch[0]);
    return t.primitives->sum(device_.stream, scratch_.data(), partials_);
  }

  Kind kind_;
  fusedstep_onednn_hyper hyper_;
  int64_t step_ = 0;
  Device device_;
  Scalar gradient_share_{device_.engine}, inverse_bias1_{device_.engine}, inverse_bias2_{device_.engine},
      one_{device_.engine}, step_size_{device_.engine};
  std::map<int64_t, Primitives> primitives_;  // by size
  std::vector<float> scratch_, partials_;
  std::vector<Tensor> tensors_;
};

thread_local std::string last_error;

const std::map<std::string, Kind> kKinds = {
    {"adagrad", Kind::kAdagrad}, {"adam", Kind::kAdam}, {"lamb", Kind::kLamb}};

}  // namespace
}  // namespace fusedstep::onednn

struct fusedstep_onednn {
  fusedstep::onednn::Optimizer optimizer;
};

fusedstep_onednn* fusedstep_onednn_new(const char* optimizer, const fusedstep_onednn_hyper* hyper,
                                       int64_t tensors, const int64_t* elements, float* const* operands) try {
  return new fusedstep_onednn{{fusedstep::onednn::kKinds.at(optimizer), *hyper, tensors, elements, operands}};
} catch (const std::exception& error) {
  fusedstep::onednn::last_error = error.what();
  return nullptr;
}

void fusedstep_onednn_delete(fusedstep_onednn* optimizer) { delete optimizer; }

int32_t fusedstep_onednn_step(fusedstep_onednn* optimizer, double lr) try {
  optimizer->optimizer.step(lr);
  return 0;
} catch (const dnnl::error& error) {
  fusedstep::onednn::last_error = error.what();
  return error.status;
}

const char* fusedstep_onednn_error() { return fusedstep::onednn::last_error.c_str(); }
