// One LAMB step of an installed fusedstep, in numbers that can be worked out by hand.
#include <fusedstep/optim/lamb.h>
#include <torch/torch.h>

#include <cmath>
#include <iostream>

int main() {
  const torch::Tensor weight = torch::tensor({3.0F, 4.0F}).requires_grad_();
  weight.mutable_grad() = torch::tensor({0.5F, -2.0F});
  fusedstep::optim::Lamb optimizer({weight}, fusedstep::optim::LambOptions(0.1));
  optimizer.step();

  // In the first step m/bc1 = g and v/bc2 = g², so that u = (1, -1) and the ratio is ‖(3, 4)‖ / ‖(1, -1)‖.
  const auto moved = static_cast<float>(0.1 * 5 / std::sqrt(2.0));
  const torch::Tensor expected = torch::tensor({3 - moved, 4 + moved});
  if (!torch::allclose(weight.detach(), expected, /*rtol=*/1e-6)) {
    std::cerr << "expected\n" << expected << "\ngot\n" << weight << '\n';
    return 1;
  }
  std::cout << "OK\n";
}
