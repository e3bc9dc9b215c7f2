// The border between the kernels, compiled by nvcc, and the host code that launches them: PODs, and tables of
// functions that launch.
#pragma once
#include <cstddef>
#include <cstdint>

#include "fusedstep/grad_use.h"
#include "src/core/code_map.h"
#include "src/core/operands.h"
#include "src/core/walk.h"
#include "src/core/weight_code.h"

struct CUstream_st;

namespace fusedstep::cuda {

using Stream = CUstream_st*;

// Stream of a kernel's launch. An `early` kernel may begin while the one before it is still at work, and
// waits for that before it reads what it may have written (see wait_for_kernel_before).
struct Queue {
  Stream stream;
  bool early = false;
};

// Bytes that a rule's hyper-parameters have, or its scalars for a step.
constexpr size_t kHyperBytes = 128, kScalarsBytes = 128;

struct alignas(16) Hyper {
  std::byte bytes[kHyperBytes];
};
struct alignas(16) Scalars {
  std::byte bytes[kScalarsBytes];
  float rounding;  // what the step adds to the exact levels of states in codes (src/core/code_map.h)
};

// A map of codes (src/core/code_map.h) as kernels read it: the same computation for all of them. It rounds to
// nearest; a step moves its thresholds and starts.
struct alignas(16) CodeTable {
  static constexpr int kValues = 256, kOctaves = CodeMap::kOctaves, kLines = 2 * kOctaves;

  // The level of a share: share * slope + start, cut off, and no more than `last`.
  struct Line {
    float slope, start;
  };
  // As far apart as lines.
  struct alignas(sizeof(Line)) Last {
    int32_t level;
  };
  struct Threshold {
    float share, gap;
  };

  float value[kValues];  // of each code, as a share
  // By the exponent % kOctaves of a share that is at least `least_share`.
  Threshold threshold[kOctaves];
  Line line[kLines];  // of the octaves below their thresholds, then of those above
  Last last[kLines];
  float least_share, top;
  float below;  // numbers below it are negative, or zero where positive ones have a floor
  // The code of a number from there on is its level + zero. That of one below is its level, between `least`
  // and `most`, * factor + negative.
  int32_t zero, least, most, factor, negative;
};

// A state that is kept in codes. Without a table it is not.
struct CodedTask {
  const CodeTable* table;
  float* absmax;  // of each block
  bool halves;    // two codes are in a byte, and a block is half as large
};

// One tensor as a kernel sees it; where its gradient is, which moves, is in a list of its own.
struct TensorTask {
  void* data[kMaxOperands];
  CodedTask coded[kMaxStates];
  // The way in which the weight keeps its value, and the tensor's place among an optimizer's, from which
  // random numbers follow. The operand behind the rule's states is kept beside the weight.
  WeightCode weight_code;
  uint64_t place;
  // Without sizes: all operands share one dense order.
  BlockLayout layout;
  bool in_order;   // if there are sizes: blocks are elements, by rows and columns
  bool as_double;  // the maths
  int64_t first_chunk, last_chunk;
};

// Access of a pass to its tensors: in words of several elements, where all operands, or the rows that a
// sparse gradient is for, form one flat range and are aligned to kWordBytes; or element by element.
enum Access : int { kInWords, kByElement, kAccesses };
constexpr int kWordBytes = 16;

// Rows that the entries of a sparse gradient are for.
struct GradRows {
  RowIndex index;
  const int64_t* sizes;    // [index.dims]
  const int64_t* strides;  // [operands][index.dims], in elements
  int64_t units;           // of a row's walk
  int64_t elements;        // of an entry
};

struct Grad {
  void* data;            // of a sparse one: its first entry
  const GradRows* rows;  // null: dense
  bool own;              // may be written
};

// A chunk by its number among those of the plan.
struct NumberedChunk {
  Chunk chunk;
  int64_t number;
};

// Sums that each chunk has a place for.
constexpr int kPartials = 2;

// Arguments of all kernels of a step. Pointers are to the device's memory.
struct Launch {
  const TensorTask* tensors;
  const Grad* grads;
  const NumberedChunk* chunks;
  int64_t chunk_count;
  const Scalars* scalars_of_tensor;  // null: `scalars` are those of all
  Scalars scalars;
  // The key of the step, for weights that are rounded at random.
  const uint64_t* draws_of_tensor;  // null: `draws` is that of all
  uint64_t draws;
  double sign;                // minus one to maximize
  double grad_factor;         // multiplies gradients
  const double* more_factor;  // and by this; null: by no more
  const float* found_inf;     // null, or whether the step is skipped
  GradUse use;
  bool stores;       // true if gradients hold the update between two phases
  double* partials;  // [chunks][kPartials]: sums of squares of weight and update
  double* ratios;    // [tensors]
  Queue queue;
};

// Progress of a tensor in a launch of both phases: chunks that have been added up, chunks that have been
// updated, and whether its ratio is known. All are zero between launches.
struct TensorProgress {
  unsigned accumulated, applied, ready;
};
// The chunks that are still to be drawn, and the blocks that have found none left. Zero between launches.
struct ChunkQueue {
  unsigned next, left;
};
// A chunk that waits for its ratio: the one that waits behind it, and where its updates are held.
struct WaitingChunk {
  int64_t next;
  int slot;
};

// Both phases in one launch.
struct TwoPhaseLaunch {
  Launch pass;
  Hyper hyper;
  TensorProgress* progress;  // [tensors]
  WaitingChunk* waiting;     // [chunks]
  ChunkQueue* queue;
  int device;
  int slots;  // chunks whose updates a block of threads can hold; the launch finds out
};

// The trust ratios of tensors from what their chunks have added up. With `asked` these sums, [tensors][2],
// are written there, and no ratios; with `given` the ratios follow from sums that lie there.
struct RatioLaunch {
  const TensorTask* tensors;
  int64_t tensor_count;
  Hyper hyper;
  const double* partials;
  double* ratios;
  double* asked;
  const double* given;
  Stream stream;
};

// The scalars of each tensor from its step count, which is incremented first, and from its other numbers,
// which become those after the step.
struct PrepareLaunch {
  const TensorTask* tensors;
  int64_t tensor_count;
  float* const* numbers;  // the counts, then each of the other numbers of each tensor
  Hyper hyper;
  const float* lr;         // null: that of `hyper`
  const float* found_inf;  // as in Launch
  Scalars* scalars;
  uint64_t seed;
  uint64_t* draws;  // of each tensor, the key of its step; null: none are asked for
  Stream stream;
};

// The first index of a sparse gradient that is out of range, in the order of RowIndex::data; kNoIndex.
constexpr unsigned long long kNoIndex = ~0ull;

struct IndexLaunch {
  const Grad* grads;
  int64_t tensor_count;
  unsigned long long* found;  // [tensors], kNoIndex before
  Stream stream;
};

// Passes over tensors with codes, the same for each access. A rule without norms has no `accumulate`.
struct CodedPasses {
  void (*accumulate)(const Launch&);
  void (*update)(const Launch&);
};

// An elementwise rule has `update` and, if a gradient of zero changes nothing, `update_rows` for steps of
// which some gradients are sparse. A two-phase rule has `two_phases` for tensors that are gone over in
// words, and `one_chunk` where each of these is no more than a chunk, and for others `accumulate` and one
// `apply` or the other, as Launch::stores says. Where float32 states would do, each has `coded_states`; where
// a master copy would do, `coded_weight` for weights that keep their value otherwise, and float32 states.
struct PassKernels {
  void (*update)(const Launch&);
  CodedPasses coded_states, coded_weight;
  void (*update_rows)(const Launch&);
  void (*two_phases)(const TwoPhaseLaunch&);
  void (*one_chunk)(const TwoPhaseLaunch&);
  void (*accumulate)(const Launch&);
  void (*apply_stored)(const Launch&);
  void (*apply_recomputed)(const Launch&);
};

struct RuleKernels {
  PassKernels of[static_cast<int>(Format::kCount)][kAccesses];
};

// Table of a rule, one for all its flags and formats. `ratio` is null for an elementwise rule.
struct RuleTable {
  const RuleKernels* of_flags;
  void (*prepare)(const PrepareLaunch&);
  void (*ratio)(const RatioLaunch&);
};

// Each rule's table is compiled by itself.
template <template <unsigned> class Rule>
const RuleTable& table_of();

// Looks for indices of sparse gradients that are out of range.
void check_indices(const IndexLaunch& launch);

// Sums of squares of gradients: of every chunk into its first partial, and of chunks [0, count) onto *sum.
void sum_grad_chunks(Format format, Access access, const Launch& launch);
void add_chunks(const double* partials, int64_t count, double* sum, Stream stream);

}  // namespace fusedstep::cuda
