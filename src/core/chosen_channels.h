// Passes of a step that moves some channels of each matrix alone: those whose sums have the largest L1 norms.
#pragma once
#include <cstdint>

#include "src/core/channels.h"

namespace fusedstep {

// Matrices of one shape, one behind another, of which as many rows or columns are chosen. The elements of an
// operand lie in one order, without a gap.
struct ChosenTensor {
  void* stored;      // sums of gradients, or weights
  const void* grad;  // null in a move
  void* product;     // of chosen channels alone: where updates go, or the directions of a move
  double factor;     // of the directions
  int32_t matrices, rows, columns, chosen;  // rows, columns and chosen channels of a matrix
  // The numbers of the first ones among those of all tensors.
  uint32_t first_channel, first_chosen, first_partial;
  Channels channels;  // rows or columns
};

// What the passes find and need on the way, for all tensors.
struct ChoiceMemory {
  double* partials;    // parts of norms
  float* norms;        // of channels
  int32_t* positions;  // of a channel among those that are chosen, or -1
  int32_t* places;     // channels that are chosen of each matrix, ascending
};

struct ChoiceOptions {
  double momentum;  // what chosen channels of a sum are multiplied by, once they are in the update
  bool maximizes;   // gradients are subtracted
};

// The last pass of a CPU: it takes gradients into the sums too.
struct ChosenMove {
  ChoiceOptions choice;
  double keep;  // what decay leaves of the weight
};

// Bits that are in the order of norms: these are not negative, and NaN is the largest.
FUSEDSTEP_FN uint32_t key_of(float norm) {
  if (norm != norm) return 0x7fffffffU;
  uint32_t bits = 0;
  __builtin_memcpy(&bits, &norm, sizeof bits);
  return bits;
}

FUSEDSTEP_FN constexpr bool has_rows(const ChosenTensor& of) { return of.channels == Channels::kRows; }
// Channels of a matrix, and the segments (src/core/channels.h) of each.
FUSEDSTEP_FN constexpr int64_t channels_of(const ChosenTensor& of) {
  return has_rows(of) ? of.rows : of.columns;
}
FUSEDSTEP_FN constexpr int64_t segments_of(const ChosenTensor& of) {
  return has_rows(of) ? pieces_of(of.columns, kRowSegment) : pieces_of(of.rows, kColumnSegment);
}
FUSEDSTEP_FN constexpr int64_t elements_of(const ChosenTensor& of) {
  return int64_t{of.matrices} * of.rows * of.columns;
}
FUSEDSTEP_FN constexpr int64_t chosen_elements_of(const ChosenTensor& of) {
  return int64_t{of.matrices} * of.chosen * (has_rows(of) ? of.columns : of.rows);
}
// A channel of one segment has no partial norms. Else those of segment s begin behind s times all channels.
FUSEDSTEP_FN constexpr int64_t partials_of(const ChosenTensor& of) {
  return segments_of(of) > 1 ? segments_of(of) * of.matrices * channels_of(of) : 0;
}

}  // namespace fusedstep
