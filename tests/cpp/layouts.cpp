#include "tests/cpp/layouts.h"

namespace fusedstep::test {
namespace {

// A rectangle cut out of a matrix, and one with gaps in both directions.
Form cut(int64_t parent_rows, int64_t parent_columns, int64_t row, int64_t column) {
  return slice({parent_rows, parent_columns}, {row, column}, {1, 1});
}

}  // namespace

std::vector<LayoutCase> layout_cases() {
  const Form five_dims = slice({3, 4, 6, 5, 9}, {1, 0, 1, 0, 2}, {1, 1, 1, 1, 1}, {3, 0, 4, 2, 1});
  const std::vector<int> channels_last = {0, 2, 3, 1};
  return {
      // All operands alike.
      {"scalar", {}, Forms::all(dense({}))},
      {"empty", {0, 5}, Forms::all(slice({4, 9}, {0, 2}, {1, 1}))},
      {"one_element", {1, 1}, Forms::all(slice({4, 9}, {2, 3}, {1, 1}))},
      {"offset", {1000}, Forms::all(slice({1100}, {13}, {1}))},
      {"transposed", {70, 130}, Forms::all(dense({70, 130}, {1, 0}))},
      {"channels_last", {3, 5, 7, 11}, Forms::all(dense({3, 5, 7, 11}, channels_last))},
      {"sliced_rows", {40, 37}, Forms::all(slice({100, 37}, {3, 0}, {2, 1}))},
      {"sliced_rows_many_chunks", {60, 700}, Forms::all(slice({200, 700}, {3, 0}, {2, 1}))},
      {"sliced_columns_long", {9, 300}, Forms::all(cut(9, 321, 0, 5))},
      {"sliced_columns_very_long", {3, 2500}, Forms::all(cut(3, 2600, 0, 9))},
      {"sliced_columns_short", {200, 20}, Forms::all(cut(200, 27, 0, 4))},
      {"sliced_columns_transposed", {20, 200}, Forms::all(slice({27, 200}, {4, 0}, {1, 1}, {1, 0}))},
      {"every_second_column", {60, 50}, Forms::all(slice({60, 100}, {0, 1}, {1, 2}))},
      {"every_second_column_long", {7, 400}, Forms::all(slice({7, 801}, {0, 1}, {1, 2}))},
      {"inner_run_1", {700, 1}, Forms::all(cut(700, 3, 0, 1))},
      {"inner_run_3", {500, 3}, Forms::all(cut(500, 5, 0, 1))},
      {"inner_run_7", {300, 7}, Forms::all(cut(300, 8, 0, 0))},
      {"inner_run_7_many_chunks", {5001, 7}, Forms::all(cut(5001, 8, 0, 0))},
      {"five_dims", {2, 4, 5, 3, 7}, Forms::all(five_dims)},
      // Each operand in its own way.
      {"gradient_transposed", {150, 70}, {dense({150, 70}), dense({150, 70}, {1, 0}), {dense({150, 70})}}},
      {"gradient_transposed_many_chunks",
       {200, 211},
       {dense({200, 211}), dense({200, 211}, {1, 0}), {dense({200, 211})}}},
      {"gradient_channels_last",
       {4, 6, 10, 9},
       {dense({4, 6, 10, 9}), dense({4, 6, 10, 9}, channels_last), {dense({4, 6, 10, 9})}}},
      {"weight_and_states_channels_last",
       {4, 6, 10, 9},
       {dense({4, 6, 10, 9}, channels_last), dense({4, 6, 10, 9}), {dense({4, 6, 10, 9}, channels_last)}}},
      {"gradient_expanded_rows", {90, 33}, {dense({90, 33}), expanded({90, 33}, {0}), {dense({90, 33})}}},
      {"gradient_expanded_columns", {33, 90}, {dense({33, 90}), expanded({33, 90}, {1}), {dense({33, 90})}}},
      {"gradient_expanded_long_rows",
       {5, 900},
       {dense({5, 900}), expanded({5, 900}, {0}), {dense({5, 900})}}},
      {"gradient_of_one_number", {5, 900}, {dense({5, 900}), expanded({5, 900}, {0, 1}), {dense({5, 900})}}},
      {"gradient_every_second_column",
       {7, 400},
       {dense({7, 400}), slice({7, 801}, {0, 1}, {1, 2}), {dense({7, 400})}}},
      {"weight_sliced_states_dense", {50, 60}, {cut(50, 70, 0, 3), dense({50, 60}), {dense({50, 60})}}},
      {"states_transposed", {90, 140}, {dense({90, 140}), dense({90, 140}), {dense({90, 140}, {1, 0})}}},
      {"every_operand_differs",
       {6, 40, 50},
       {slice({6, 45, 50}, {0, 5, 0}, {1, 1, 1}),
        dense({6, 40, 50}, {2, 1, 0}),
        {dense({6, 40, 50}, {1, 0, 2}), slice({8, 40, 101}, {1, 0, 1}, {1, 1, 2}, {2, 0, 1})}}},
  };
}

}  // namespace fusedstep::test
