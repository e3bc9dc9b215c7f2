#pragma once

// Reads the IDX files of the MNIST database.
//
// An IDX file holds one array: two zero bytes, a type byte (8: unsigned byte), the number of dimensions, each
// dimension as a big-endian 32-bit number, then the elements in C order. Source: "The MNIST database of
// handwritten digits", Y. LeCun, C. Cortes, C. J. C. Burges.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace mnist {

inline constexpr std::size_t kSide = 28;  // pixels an image is high and wide
inline constexpr std::size_t kClasses = 10;

/// A file is not the IDX file it should be; the text names the file and the reason.
struct IdxError : std::runtime_error {
  IdxError(const std::filesystem::path& path, const std::string& reason)
      : std::runtime_error(path.string() + ": " + reason) {}
};

struct IdxArray {
  std::vector<std::size_t> shape;
  std::vector<std::uint8_t> elements;
};

/// The file `name` of `folder`, as it is or gzipped (`name.gz`); empty if neither is there.
std::optional<std::filesystem::path> locate(const std::filesystem::path& folder, const std::string& name);

/// The array of `dimensions` dimensions in `path`, which is gzipped if it ends in `.gz`.
/// Throws IdxError: unreadable, not gzip, damaged or cut off, another kind of file, more than 2^30 elements,
/// or fewer or more than the header declares. No more is read or unpacked than that.
IdxArray read_idx(const std::filesystem::path& path, std::size_t dimensions);

struct ImageSet {
  std::vector<std::uint8_t> images;  // [n, 28, 28]
  std::vector<std::uint8_t> labels;  // [n]
};

/// The set `name`: "train" or "t10k". Throws IdxError: as read_idx; or a file is missing, the images have
/// another size, there is none, there is another number of labels, or a label is not in 0..9.
ImageSet read_set(const std::filesystem::path& folder, const std::string& name);

}  // namespace mnist
