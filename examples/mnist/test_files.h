#pragma once

// Folders and IDX files for the tests.

#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace mnist {

inline void append_big_endian(std::string& bytes, std::uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift);
}

/// The bytes of an IDX file; the elements may be fewer or more than the shape says.
inline std::string idx_bytes(const std::vector<std::uint32_t>& shape, const std::string& elements,
                             std::uint32_t type = 8) {
  std::string bytes;
  append_big_endian(bytes, type << 8 | static_cast<std::uint32_t>(shape.size()));
  for (const std::uint32_t size : shape) append_big_endian(bytes, size);
  return bytes + elements;
}

/// A fixture with a folder of its own.
class FolderTest : public testing::Test {
 protected:
  FolderTest()
      : folder(std::filesystem::path(testing::TempDir()) /
               ("mnist." + std::to_string(getpid()) + "." +
                testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::create_directories(folder);
  }
  ~FolderTest() override { std::filesystem::remove_all(folder); }

  std::filesystem::path write(const std::filesystem::path& name, const std::string& bytes) const {
    std::filesystem::create_directories((folder / name).parent_path());
    std::ofstream(folder / name, std::ios::binary) << bytes;
    return folder / name;
  }

  std::filesystem::path write_gzip(const std::filesystem::path& name, const std::string& bytes) const {
    const std::filesystem::path path = folder / name;
    // Stored, not compressed: so a test knows what a damaged byte means.
    const gzFile file = gzopen(path.c_str(), "wb0");
    EXPECT_EQ(gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())),
              static_cast<int>(bytes.size()));
    EXPECT_EQ(gzclose(file), Z_OK);
    return path;
  }

  /// The four files of a set of images, all 28x28.
  void write_sets(const std::filesystem::path& subfolder, const std::string& train_labels,
                  const std::string& test_labels) {
    const auto write_set = [&](const std::string& name, const std::string& labels) {
      const auto count = static_cast<std::uint32_t>(labels.size());
      write(subfolder / (name + "-images-idx3-ubyte"),
            idx_bytes({count, 28, 28}, std::string(std::size_t{count} * 28 * 28, '\7')));
      write(subfolder / (name + "-labels-idx1-ubyte"), idx_bytes({count}, labels));
    };
    write_set("train", train_labels);
    write_set("t10k", test_labels);
  }

  const std::filesystem::path folder;
};

}  // namespace mnist
