#include "idx.h"

#include <zlib.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <system_error>
#include <utility>

namespace mnist {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::uint32_t kUnsignedByte = 8;
constexpr std::size_t kMost = std::size_t{1} << 30;  // elements of an array: MNIST has 47 million

Bytes read_plain(const std::filesystem::path& path, std::size_t most) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  Bytes bytes(error ? 0 : std::min<std::size_t>(size, most));
  std::ifstream file(path, std::ios::binary);
  if (error ||
      !file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()))) {
    throw IdxError(path, "cannot be read");
  }
  return bytes;
}

Bytes read_gzip(const std::filesystem::path& path, std::size_t most) {
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), gzclose);
  if (!file) throw IdxError(path, "cannot be read");
  // zlib hands on what is not gzip as it is.
  if (gzdirect(file.get())) throw IdxError(path, "corrupt gzip: no gzip header");

  constexpr std::size_t kBlock = 1u << 20;
  Bytes bytes;
  for (int got = 1; got > 0 && bytes.size() < most;) {
    const std::size_t size = bytes.size(), block = std::min(kBlock, most - size);
    bytes.resize(size + block);
    got = gzread(file.get(), bytes.data() + size, static_cast<unsigned>(block));
    bytes.resize(size + std::max(got, 0));
  }
  int code = Z_OK;
  const std::string message = gzerror(file.get(), &code);
  if (code == Z_BUF_ERROR) throw IdxError(path, "truncated: the gzip stream ends too early");
  if (code != Z_OK) throw IdxError(path, "corrupt gzip: " + message.substr(message.rfind(": ") + 2));
  return bytes;
}

/// The first `most` bytes of a file, unpacked, or all if it has fewer.
Bytes read(const std::filesystem::path& path, std::size_t most) {
  return path.extension() == ".gz" ? read_gzip(path, most) : read_plain(path, most);
}

std::uint32_t big_endian(const std::uint8_t* bytes) {
  return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 | std::uint32_t{bytes[2]} << 8 |
         bytes[3];
}

std::string hexadecimal(std::uint32_t value) {
  char text[11];
  std::snprintf(text, sizeof text, "0x%08x", value);
  return text;
}

/// The product of the dimensions, or empty where it is more than `limit`: it may not even fit a machine word.
std::optional<std::size_t> product(const std::vector<std::size_t>& shape, std::size_t limit) {
  if (std::ranges::count(shape, 0u) > 0) return 0;
  std::size_t product = 1;
  for (const std::size_t size : shape) {
    if (product > limit / size) return std::nullopt;
    product *= size;
  }
  return product;
}

std::string join(const std::vector<std::size_t>& shape) {
  std::string text;
  for (const std::size_t size : shape) text += (text.empty() ? "" : "x") + std::to_string(size);
  return text;
}

std::filesystem::path require(const std::filesystem::path& folder, const std::string& name) {
  if (const auto path = locate(folder, name)) return *path;
  throw IdxError(folder, "neither " + name + " nor " + name + ".gz is there");
}

}  // namespace

std::optional<std::filesystem::path> locate(const std::filesystem::path& folder, const std::string& name) {
  for (const auto& path : {folder / name, folder / (name + ".gz")}) {
    if (std::filesystem::is_regular_file(path)) return path;
  }
  return std::nullopt;
}

IdxArray read_idx(const std::filesystem::path& path, std::size_t dimensions) {
  const std::size_t header = 4 + 4 * dimensions;
  Bytes bytes = read(path, header);
  if (bytes.size() < header) {
    throw IdxError(path, "truncated: " + std::to_string(bytes.size()) + " bytes, the header alone takes " +
                             std::to_string(header));
  }
  const std::uint32_t magic = big_endian(bytes.data());
  const std::uint32_t expected_magic = kUnsignedByte << 8 | static_cast<std::uint32_t>(dimensions);
  if (magic != expected_magic) {
    throw IdxError(path,
                   "wrong magic number " + hexadecimal(magic) + ", expected " + hexadecimal(expected_magic));
  }
  std::vector<std::size_t> shape;
  for (std::size_t i = 0; i < dimensions; ++i) shape.push_back(big_endian(bytes.data() + 4 + 4 * i));
  const std::string text = "the header declares " + join(shape) + " bytes, ";
  const std::optional<std::size_t> declared = product(shape, kMost);
  if (!declared)
    throw IdxError(path, "too large: " + text + "at most " + std::to_string(kMost) + " are read");
  bytes = read(path, header + *declared + 1);
  const std::size_t elements = bytes.size() - header;
  if (elements < *declared)
    throw IdxError(path, "truncated: " + text + std::to_string(elements) + " are there");
  if (elements > *declared) throw IdxError(path, "too long: " + text + "more are there");
  bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(header));
  return {std::move(shape), std::move(bytes)};
}

ImageSet read_set(const std::filesystem::path& folder, const std::string& name) {
  const auto images_path = require(folder, name + "-images-idx3-ubyte");
  const auto labels_path = require(folder, name + "-labels-idx1-ubyte");
  IdxArray images = read_idx(images_path, 3);
  IdxArray labels = read_idx(labels_path, 1);
  const std::size_t count = images.shape[0];
  if (images.shape[1] != kSide || images.shape[2] != kSide) {
    throw IdxError(images_path, "images of " + join({images.shape[1], images.shape[2]}) + ", expected " +
                                    join({kSide, kSide}));
  }
  if (count == 0) throw IdxError(images_path, "no images");
  if (labels.shape[0] != count) {
    throw IdxError(labels_path, std::to_string(labels.shape[0]) + " labels for the " + std::to_string(count) +
                                    " images of " + images_path.filename().string());
  }
  const auto bad =
      std::ranges::find_if(labels.elements, [](std::uint8_t label) { return label >= kClasses; });
  if (bad != labels.elements.end()) {
    throw IdxError(labels_path, "label " + std::to_string(*bad) + " at " +
                                    std::to_string(bad - labels.elements.begin()) + ", expected 0 to " +
                                    std::to_string(kClasses - 1));
  }
  return {std::move(images.elements), std::move(labels.elements)};
}

}  // namespace mnist
