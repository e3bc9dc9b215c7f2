// An installed fusedstep: one LAMB step in numbers that can be worked out by hand, then the weights that each
// optimizer reaches in five steps, bit by bit, for Python to compare with its own.
#include <fusedstep/optim/adagrad.h>
#include <fusedstep/optim/adam.h>
#include <fusedstep/optim/adamw.h>
#include <fusedstep/optim/lamb.h>
#include <torch/torch.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <iostream>

namespace optim = fusedstep::optim;

bool lamb_is_right() {
  const torch::Tensor weight = torch::tensor({3.0F, 4.0F}).requires_grad_();
  weight.mutable_grad() = torch::tensor({0.5F, -2.0F});
  optim::Lamb optimizer({weight}, optim::LambOptions(0.1));
  optimizer.step();

  // In the first step m/bc1 = g and v/bc2 = g², so that u = (1, -1) and the ratio is ‖(3, 4)‖ / ‖(1, -1)‖.
  const auto moved = static_cast<float>(0.1 * 5 / std::sqrt(2.0));
  return torch::allclose(weight.detach(), torch::tensor({3 - moved, 4 + moved}), /*rtol=*/1e-6);
}

// Eighths that depend on nothing but where they stand: exact in both languages.
torch::Tensor eighths(int64_t factor, int64_t modulus) {
  return (torch::arange(50000) * factor % modulus - modulus / 2)
      .to(torch::kFloat32)
      .div(8)
      .reshape({500, 100});
}

template <class Optimizer, class Options>
void print_bits(const char* name, const Options& options) {
  const torch::Tensor weight = eighths(7, 13).requires_grad_();
  Optimizer optimizer({weight}, options);
  for (int64_t step = 1; step <= 5; ++step) {
    weight.mutable_grad() = eighths(step, 29);
    optimizer.step();
  }
  uint64_t hash = 14695981039346656037U;  // FNV-1a over the weights' bits
  const float* data = weight.data_ptr<float>();
  for (int64_t i = 0; i < weight.numel(); ++i)
    hash = (hash ^ std::bit_cast<uint32_t>(data[i])) * 1099511628211U;
  std::cout << name << ' ' << hash << '\n';
}

int main() {
  if (!lamb_is_right()) {
    std::cerr << "a LAMB step is wrong\n";
    return 1;
  }
  print_bits<optim::Lamb>("Lamb", optim::LambOptions(0.01).weight_decay(0.1));
  print_bits<optim::Lamb>("Lamb-apex", optim::LambOptions::apex(0.01));
  print_bits<optim::Lamb>("Lamb-nvlamb", optim::LambOptions::nvlamb(0.01).weight_decay(0));
  print_bits<optim::Lamb>("Lamb-timm", optim::LambOptions::timm(0.01).decoupled_decay(true));
  print_bits<optim::Lamb>("Lamb-deepspeed", optim::LambOptions::deepspeed(0.01));
  print_bits<optim::Lamb>("Lamb-cybertron", optim::LambOptions::cybertron(0.01));
  print_bits<optim::Adam>("Adam", optim::AdamOptions(0.01).weight_decay(0.1).amsgrad(true));
  print_bits<optim::AdamW>("AdamW", optim::AdamWOptions(0.01).weight_decay(0.1));
  print_bits<optim::Adagrad>("Adagrad", optim::AdagradOptions(0.01).weight_decay(0.1).lr_decay(0.1));
}
