// An installed fusedstep: one LAMB step in numbers that can be worked out by hand.
#include <fusedstep/optim.h>
#include <torch/torch.h>

#include <cmath>
#include <stdexcept>

namespace optim = fusedstep::optim;

int main() {
  const torch::Tensor weight = torch::tensor({3.0F, 4.0F}).requires_grad_();
  weight.mutable_grad() = torch::tensor({0.5F, -2.0F});
  optim::Lamb optimizer({weight}, optim::LambOptions(0.1));
  optimizer.step();

  // In the first step m/bc1 = g and v/bc2 = g², so that u = (1, -1) and the ratio is ‖(3, 4)‖ / ‖(1, -1)‖.
  const auto moved = static_cast<float>(0.1 * 5 / std::sqrt(2.0));
  if (!torch::allclose(weight.detach(), torch::tensor({3 - moved, 4 + moved}), /*rtol=*/1e-6)) {
    throw std::runtime_error("a LAMB step is wrong");
  }
}
