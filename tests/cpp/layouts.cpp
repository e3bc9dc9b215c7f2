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
  // As a convolution's weight that was made channels-last and its gradient that was not.
  const auto channels_last_weight = [&](const Sizes& sizes) {
    return Forms{dense(sizes, channels_last), dense(sizes), {dense(sizes, channels_last)}};
  };
  const auto transposed_grad = [](const Sizes& sizes, const std::vector<int>& order) {
    return Forms{dense(sizes), dense(sizes, order), {dense(sizes)}};
  };
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
      {"gradient_transposed_one_over", {33, 65}, transposed_grad({33, 65}, {1, 0})},
      {"gradient_transposed_half_squares", {17, 65}, transposed_grad({17, 65}, {1, 0})},
      {"gradient_transposed_half_over", {48, 54}, transposed_grad({48, 54}, {1, 0})},
      {"gradient_transposed_few_rows", {3, 400}, transposed_grad({3, 400}, {1, 0})},
      {"gradient_transposed_few_columns", {700, 3}, transposed_grad({700, 3}, {1, 0})},
      {"gradient_transposed_two_columns", {600, 2}, transposed_grad({600, 2}, {1, 0})},
      {"gradient_transposed_in_small_blocks", {200, 2, 3}, transposed_grad({200, 2, 3}, {0, 2, 1})},
      {"gradient_transposed_in_smallest_blocks", {300, 2, 2}, transposed_grad({300, 2, 2}, {0, 2, 1})},
      {"gradient_transposed_in_four_dims", {3, 34, 2, 70}, transposed_grad({3, 34, 2, 70}, {2, 0, 3, 1})},
      {"gradient_transposed_in_half_squares", {3, 18, 2, 70}, transposed_grad({3, 18, 2, 70}, {2, 0, 3, 1})},
      {"gradient_transposed_and_expanded",
       {6, 20, 30},
       {dense({6, 20, 30}), expanded({6, 20, 30}, {0}, {0, 2, 1}), {dense({6, 20, 30})}}},
      {"gradient_transposed_and_sliced",
       {40, 70},
       {cut(40, 77, 0, 3), slice({41, 211}, {1, 1}, {1, 3}, {1, 0}), {dense({40, 70})}}},
      {"first_convolution_channels_last", {8, 3, 7, 7}, channels_last_weight({8, 3, 7, 7})},
      {"convolution_channels_last", {3, 120, 3, 3}, channels_last_weight({3, 120, 3, 3})},
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
      {"four_orders",
       {5, 6, 7, 8},
       {dense({5, 6, 7, 8}),
        dense({5, 6, 7, 8}, {3, 1, 0, 2}),
        {dense({5, 6, 7, 8}, {2, 0, 3, 1}), dense({5, 6, 7, 8}, {0, 3, 2, 1})}}},
      {"every_operand_differs",
       {6, 40, 50},
       {slice({6, 45, 50}, {0, 5, 0}, {1, 1, 1}),
        dense({6, 40, 50}, {2, 1, 0}),
        {dense({6, 40, 50}, {1, 0, 2}), slice({8, 40, 101}, {1, 0, 1}, {1, 1, 2}, {2, 0, 1})}}},
  };
}

}  // namespace fusedstep::test
