#include "data.h"

#include <cstdlib>
#include <stdexcept>

#include "test_files.h"

namespace mnist {
namespace {

class FindDataTest : public FolderTest {
 protected:
  FindDataTest() { unsetenv("FUSEDSTEP_DATA"); }
  ~FindDataTest() override { unsetenv("FUSEDSTEP_DATA"); }

  void put(const std::string& subfolder) { write_sets(subfolder, "\1", "\2"); }
};

TEST_F(FindDataTest, TakesTheNamedFolderOrMnistInIt) {
  put("here");
  put("there/mnist");
  EXPECT_EQ(find_data(folder / "here", {}), folder / "here");
  EXPECT_EQ(find_data(folder / "there", {}), folder / "there" / "mnist");
}

TEST_F(FindDataTest, LooksInTheOptionThenTheEnvironmentThenTheRoots) {
  put("option");
  put("environment/mnist");
  put("first/data");
  put("second/data/mnist");
  const std::vector<std::filesystem::path> roots{folder / "none", folder / "first", folder / "second"};
  setenv("FUSEDSTEP_DATA", (folder / "environment").c_str(), 1);
  EXPECT_EQ(find_data(folder / "option", roots), folder / "option");
  EXPECT_EQ(find_data("", roots), folder / "environment" / "mnist");
  unsetenv("FUSEDSTEP_DATA");
  EXPECT_EQ(find_data("", roots), folder / "first" / "data");
  std::filesystem::remove(folder / "first" / "data" / "t10k-labels-idx1-ubyte");
  EXPECT_EQ(find_data("", roots), folder / "second" / "data" / "mnist");
}

TEST_F(FindDataTest, NeverPassesOverWhatTheUserNames) {
  put("first/data");
  EXPECT_THROW(find_data(folder / "none", {folder / "first"}), std::runtime_error);
  setenv("FUSEDSTEP_DATA", (folder / "none").c_str(), 1);
  EXPECT_THROW(find_data("", {folder / "first"}), std::runtime_error);
}

TEST_F(FindDataTest, SaysWhereItLookedAndWhatToDo) {
  try {
    find_data("", {folder});
    FAIL() << "no error";
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find((folder / "data" / "mnist").string()), std::string::npos) << text;
    EXPECT_NE(text.find("run.sh mnist"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace mnist
