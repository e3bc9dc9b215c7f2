#include "idx.h"

#include <functional>

#include "test_files.h"

namespace mnist {
namespace {

using IdxTest = FolderTest;
using Bytes = std::vector<std::uint8_t>;

/// Runs `read` and expects an IdxError with exactly the text "PATH: REASON".
void expect_error(const std::function<void()>& read, const std::filesystem::path& path,
                  const std::string& reason) {
  try {
    read();
    FAIL() << "no error; expected: " << reason;
  } catch (const IdxError& error) {
    EXPECT_EQ(error.what(), path.string() + ": " + reason);
  }
}

void expect_read_error(const std::filesystem::path& path, std::size_t dimensions, const std::string& reason) {
  expect_error([&] { read_idx(path, dimensions); }, path, reason);
}

std::string damaged(std::string bytes, std::size_t at) {
  bytes.at(at) = static_cast<char>(~bytes.at(at));
  return bytes;
}

std::string content(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_F(IdxTest, ReadsPlainAndGzipAlike) {
  const std::string bytes = idx_bytes({2, 1, 3}, {1, 2, 3, 4, 5, '\xff'});
  for (const auto& path : {write("a-idx3-ubyte", bytes), write_gzip("a-idx3-ubyte.gz", bytes)}) {
    const IdxArray array = read_idx(path, 3);
    EXPECT_EQ(array.shape, (std::vector<std::size_t>{2, 1, 3}));
    EXPECT_EQ(array.elements, (Bytes{1, 2, 3, 4, 5, 255}));
  }
}

TEST_F(IdxTest, ReadsBigEndianSizesAcrossSeveralBlocks) {
  const std::string elements(0x280001, '\5');  // more than two of the blocks that are unzipped at a time
  const IdxArray array = read_idx(write_gzip("a.gz", idx_bytes({0x280001}, elements)), 1);
  EXPECT_EQ(array.shape, (std::vector<std::size_t>{0x280001}));
  EXPECT_EQ(array.elements, Bytes(elements.begin(), elements.end()));
}

TEST_F(IdxTest, ReadsAnEmptyArray) {
  const IdxArray array = read_idx(write("a", idx_bytes({0, 0xffffffff, 0xffffffff}, "")), 3);
  EXPECT_TRUE(array.elements.empty());
}

TEST_F(IdxTest, RefusesATruncatedHeader) {
  expect_read_error(write("empty", ""), 1, "truncated: 0 bytes, the header alone takes 8");
  expect_read_error(write("short", idx_bytes({1, 28}, "")), 3,
                    "truncated: 12 bytes, the header alone takes 16");
}

TEST_F(IdxTest, RefusesAnotherNumberOfElements) {
  expect_read_error(write("less", idx_bytes({4}, "abc")), 1,
                    "truncated: the header declares 4 bytes, 3 are there");
  expect_read_error(write("more", idx_bytes({2, 1}, "abc")), 2,
                    "too long: the header declares 2x1 bytes, more are there");
}

TEST_F(IdxTest, RefusesSizesWhoseProductOverflows) {
  // 2^31 * 2^31 * 4 elements are 0 modulo 2^64, and (2^32-1)^3 more than 64 bits hold.
  expect_read_error(
      write("a", idx_bytes({0x80000000, 0x80000000, 4}, "")), 3,
      "too large: the header declares 2147483648x2147483648x4 bytes, at most 1073741824 are read");
  expect_read_error(
      write("b", idx_bytes({0xffffffff, 0xffffffff, 0xffffffff}, "abc")), 3,
      "too large: the header declares 4294967295x4294967295x4294967295 bytes, at most 1073741824 are read");
}

TEST_F(IdxTest, UnpacksNoMoreThanTheHeaderDeclares) {
  // The checksum is wrong, but nobody gets there.
  const std::string bytes = content(write_gzip("a.gz", idx_bytes({2}, std::string(9 << 20, 'a'))));
  expect_read_error(write("b.gz", damaged(bytes, bytes.size() - 6)), 1,
                    "too long: the header declares 2 bytes, more are there");
  expect_read_error(write_gzip("c.gz", idx_bytes({(1 << 30) + 1}, "a")), 1,
                    "too large: the header declares 1073741825 bytes, at most 1073741824 are read");
}

TEST_F(IdxTest, RefusesAnotherMagicNumber) {
  expect_read_error(write("labels", idx_bytes({4}, "abcdefghijkl")), 3,
                    "wrong magic number 0x00000801, expected 0x00000803");
  expect_read_error(write("floats", idx_bytes({1}, "abcd", 13)), 1,
                    "wrong magic number 0x00000d01, expected 0x00000801");
  expect_read_error(write("gzip", content(write_gzip("a.gz", idx_bytes({1}, "a")))), 1,
                    "wrong magic number 0x1f8b0800, expected 0x00000801");
}

TEST_F(IdxTest, RefusesATruncatedGzip) {
  const std::string bytes = content(write_gzip("whole.gz", idx_bytes({5}, "abcde")));
  // Cut in the checksum, in the data and right behind the 10 bytes of the gzip header.
  for (const std::size_t size : {bytes.size() - 1, bytes.size() - 12, std::size_t{10}}) {
    expect_read_error(write("cut.gz", bytes.substr(0, size)), 1, "truncated: the gzip stream ends too early");
  }
}

TEST_F(IdxTest, RefusesACorruptGzip) {
  const std::string bytes = content(write_gzip("whole.gz", idx_bytes({5}, "abcde")));
  expect_read_error(write("checksum.gz", damaged(bytes, bytes.size() - 6)), 1,
                    "corrupt gzip: incorrect data check");
  expect_read_error(write("data.gz", damaged(bytes, 10)), 1, "corrupt gzip: invalid block type");
  expect_read_error(write("plain.gz", idx_bytes({1}, "a")), 1, "corrupt gzip: no gzip header");
}

TEST_F(IdxTest, RefusesWhatCannotBeRead) {
  expect_read_error(folder / "missing", 1, "cannot be read");
  expect_read_error(folder / "missing.gz", 1, "cannot be read");
}

TEST_F(IdxTest, LocatesThePlainFileFirst) {
  EXPECT_EQ(locate(folder, "a"), std::nullopt);
  const auto zipped = write_gzip("a.gz", "");
  EXPECT_EQ(locate(folder, "a"), zipped);
  const auto plain = write("a", "");
  EXPECT_EQ(locate(folder, "a"), plain);
}

class SetTest : public FolderTest {
 protected:
  const std::filesystem::path images = folder / "train-images-idx3-ubyte";
  const std::filesystem::path labels = folder / "train-labels-idx1-ubyte";

  SetTest() { write_sets("", {3, 9, 0}, {1}); }

  void expect_set_error(const std::filesystem::path& path, const std::string& reason) const {
    expect_error([&] { read_set(folder, "train"); }, path, reason);
  }
};

TEST_F(SetTest, ReadsImagesAndLabels) {
  const ImageSet set = read_set(folder, "train");
  EXPECT_EQ(set.images, Bytes(3 * 28 * 28, 7));
  EXPECT_EQ(set.labels, (Bytes{3, 9, 0}));
  EXPECT_EQ(read_set(folder, "t10k").labels, (Bytes{1}));
}

TEST_F(SetTest, RefusesAMissingFile) {
  std::filesystem::remove(labels);
  expect_set_error(folder, "neither train-labels-idx1-ubyte nor train-labels-idx1-ubyte.gz is there");
}

TEST_F(SetTest, RefusesAnotherNumberOfLabels) {
  write(labels.filename(), idx_bytes({2}, {1, 2}));
  expect_set_error(labels, "2 labels for the 3 images of train-images-idx3-ubyte");
}

TEST_F(SetTest, RefusesALabelOutOfRange) {
  write(labels.filename(), idx_bytes({3}, {1, 10, 2}));
  expect_set_error(labels, "label 10 at 1, expected 0 to 9");
}

TEST_F(SetTest, RefusesImagesOfAnotherSize) {
  write(images.filename(), idx_bytes({3, 28, 27}, std::string(3 * 28 * 27, 'a')));
  expect_set_error(images, "images of 28x27, expected 28x28");
}

TEST_F(SetTest, RefusesAnEmptySet) {
  write(images.filename(), idx_bytes({0, 28, 28}, ""));
  write(labels.filename(), idx_bytes({0}, ""));
  expect_set_error(images, "no images");
}

}  // namespace
}  // namespace mnist
