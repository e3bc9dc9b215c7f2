// Trains the LeNet-like network of PyTorch's MNIST example with fused LAMB.
//
// The same as mnist.py, which with the same seed, threads and options draws the same random numbers.

#include <fusedstep/optim/lamb.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "data.h"
#include "idx.h"
#include "options.h"
#include "progress.h"
#include "report.h"

namespace {

namespace F = torch::nn::functional;
using torch::Tensor;

constexpr double kMean = 0.1307, kStandardDeviation = 0.3081;  // of MNIST's training pixels, scaled to 0..1

/// Images [n, 1, 28, 28] to the logarithms of their class probabilities [n, 10].
struct Net : torch::nn::Module {
  torch::nn::Conv2d conv1 = register_module("conv1", torch::nn::Conv2d(1, 32, 3));
  torch::nn::Conv2d conv2 = register_module("conv2", torch::nn::Conv2d(32, 64, 3));
  torch::nn::Dropout dropout1 = register_module("dropout1", torch::nn::Dropout(0.25));
  torch::nn::Dropout dropout2 = register_module("dropout2", torch::nn::Dropout(0.5));
  torch::nn::Linear fc1 = register_module("fc1", torch::nn::Linear(9216, 128));
  torch::nn::Linear fc2 = register_module("fc2", torch::nn::Linear(128, 10));

  Tensor forward(Tensor x) {
    x = torch::relu(conv1(x));
    x = torch::relu(conv2(x));
    x = dropout1(torch::max_pool2d(x, 2));
    x = torch::relu(fc1(torch::flatten(x, 1)));
    x = fc2(dropout2(x));
    return torch::log_softmax(x, 1);
  }
};

struct TensorSet {
  Tensor images;  // [n, 1, 28, 28], float32, normalized
  Tensor labels;  // [n], int64

  std::int64_t size() const { return labels.numel(); }
};

/// The whole set as one tensor, 188 MB for MNIST, and a batch one index_select from it: that takes under 1 %
/// of a step, so there is nothing for the workers of a data loader to hide.
TensorSet load(const std::filesystem::path& folder, const std::string& name) {
  mnist::ImageSet set = mnist::read_set(folder, name);
  const auto count = static_cast<std::int64_t>(set.labels.size());
  constexpr auto kSide = static_cast<std::int64_t>(mnist::kSide);
  const Tensor images = torch::from_blob(set.images.data(), {count, 1, kSide, kSide}, torch::kUInt8);
  const Tensor labels = torch::from_blob(set.labels.data(), {count}, torch::kUInt8);
  return {images.to(torch::kFloat32).div_(255).sub_(kMean).div_(kStandardDeviation),
          labels.to(torch::kInt64)};
}

/// Trains one epoch over the shuffled images and returns the loss of every `log_interval`-th step.
std::vector<double> train(Net& model, torch::optim::Optimizer& optimizer, const TensorSet& set,
                          const mnist::Options& options, const std::string& title) {
  const std::vector<Tensor> batches = torch::randperm(set.size()).split(options.batch_size);
  mnist::Progress progress(title, static_cast<std::int64_t>(batches.size()));
  std::vector<double> losses;
  std::string note;
  model.train();
  for (std::size_t step = 0; step < batches.size(); ++step) {
    optimizer.zero_grad();
    const Tensor output = model.forward(set.images.index_select(0, batches[step]));
    const Tensor loss = F::nll_loss(output, set.labels.index_select(0, batches[step]));
    loss.backward();
    optimizer.step();
    if (step % static_cast<std::size_t>(options.log_interval) == 0) {
      losses.push_back(loss.item<double>());
      char text[32];
      std::snprintf(text, sizeof text, "loss %.4f", losses.back());
      note = text;
    }
    progress.advance(note);
  }
  return losses;
}

/// The average loss over all images, and how many were classified correctly.
std::pair<double, std::int64_t> test(Net& model, const TensorSet& set, std::int64_t batch_size) {
  const torch::NoGradGuard no_grad;
  double loss = 0;
  std::int64_t correct = 0;
  model.eval();
  for (std::int64_t begin = 0; begin < set.size(); begin += batch_size) {
    const std::int64_t end = std::min(begin + batch_size, set.size());
    const Tensor output = model.forward(set.images.slice(0, begin, end));
    const Tensor labels = set.labels.slice(0, begin, end);
    loss += F::nll_loss(output, labels, F::NLLLossFuncOptions().reduction(torch::kSum)).item<double>();
    correct += output.argmax(1).eq(labels).sum().item<std::int64_t>();
  }
  return {loss / static_cast<double>(set.size()), correct};
}

void run(const mnist::Options& options) {
  torch::manual_seed(static_cast<std::uint64_t>(options.seed));
  if (options.threads > 0) torch::set_num_threads(static_cast<int>(options.threads));

  const auto folder = mnist::find_data(options.data, {std::filesystem::current_path(), MNIST_REPOSITORY});
  const TensorSet train_set = load(folder, "train"), test_set = load(folder, "t10k");

  Net model;
  fusedstep::optim::Lamb optimizer(model.parameters(), fusedstep::optim::LambOptions(options.lr));
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, options.gamma);
  scheduler.step();  // LibTorch's first call changes nothing; in Python the constructor makes it
  mnist::Report report{.options = options,
                       .torch = TORCH_VERSION,
                       .isa = fusedstep::isa(),
                       .threads = torch::get_num_threads(),
                       .train_images = train_set.size(),
                       .test_images = test_set.size(),
                       .epochs = {}};

  for (std::int64_t epoch = 1; epoch <= options.epochs; ++epoch) {
    const std::string title = "Epoch " + std::to_string(epoch) + "/" + std::to_string(options.epochs);
    const auto start = std::chrono::steady_clock::now();
    const std::vector<double> losses = train(model, optimizer, train_set, options, title);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    scheduler.step();

    const auto [loss, correct] = test(model, test_set, options.test_batch_size);
    std::printf("Test set: Average loss: %.4f, Accuracy: %lld/%lld (%.0f%%)\n", loss,
                static_cast<long long>(correct), static_cast<long long>(test_set.size()),
                100. * static_cast<double>(correct) / static_cast<double>(test_set.size()));
    std::fflush(stdout);
    report.epochs.push_back({loss, correct, seconds.count(), losses});
    report.write();
  }
  std::cerr << report.closing_line() << '\n';  // standard output has one line an epoch, as torch's example
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const mnist::Options options = mnist::parse_options({argv + 1, argv + argc});
    if (options.help) {
      std::cout << mnist::usage();
    } else {
      run(options);
    }
  } catch (const mnist::UsageError& error) {
    std::cerr << "mnist: " << error.what() << " (see mnist --help)\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "mnist: " << error.what() << "\n";
    return 1;
  }
}
