#include "report.h"

#include <sys/resource.h>

#include <charconv>
#include <cstdio>
#include <fstream>
#include <stdexcept>

namespace mnist {
namespace {

/// As few digits as give the same number back.
std::string shortest(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

}  // namespace

void Report::write() const {
  if (options.json.empty()) return;
  std::ofstream out(options.json);
  out << R"({"language": "C++", "torch": ")" << torch << R"(", "isa": ")" << isa << R"(", "fused": true)"
      << R"(, "threads": )" << threads << R"(, "seed": )" << options.seed << R"(, "batch_size": )"
      << options.batch_size << R"(, "lr": )" << shortest(options.lr) << R"(, "gamma": )"
      << shortest(options.gamma) << R"(, "log_interval": )" << options.log_interval << R"(, "train_images": )"
      << train_images << R"(, "test_images": )" << test_images << R"(, "epochs": [)";
  for (std::size_t i = 0; i < epochs.size(); ++i) {
    const EpochFigures& epoch = epochs[i];
    const double accuracy = static_cast<double>(epoch.correct) / static_cast<double>(test_images);
    out << (i ? ", " : "") << R"({"epoch": )" << i + 1 << R"(, "loss": )" << shortest(epoch.loss)
        << R"(, "accuracy": )" << shortest(accuracy) << R"(, "seconds": )" << shortest(epoch.seconds)
        << R"(, "training_losses": [)";
    for (std::size_t j = 0; j < epoch.training_losses.size(); ++j) {
      out << (j ? ", " : "") << shortest(epoch.training_losses[j]);
    }
    out << "]}";
  }
  out << "]}\n" << std::flush;
  if (!out) throw std::runtime_error(options.json + ": cannot be written");
}

std::string Report::closing_line() const {
  double seconds = 0;
  for (const EpochFigures& epoch : epochs) seconds += epoch.seconds;
  const double samples = static_cast<double>(train_images) * static_cast<double>(epochs.size());
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  char text[160];
  std::snprintf(text, sizeof text,
                "%.2f s, %.0f samples/s, %.0f MiB resident, torch included; loss %.3f to %.3f", seconds,
                samples / seconds, static_cast<double>(usage.ru_maxrss) / 1024,
                epochs.front().training_losses.front(), epochs.back().training_losses.back());
  return text;
}

}  // namespace mnist
