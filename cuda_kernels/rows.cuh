// Walks the rows that a sparse gradient has entries for, by a block of threads. A chunk is some of the
// entries, or a part of one entry. Entries of the same row are adjacent. The threads at a row's first entry
// add up all its entries in order and update the row; threads at other entries return.
#pragma once
#include "cuda_kernels/elementwise.cuh"

namespace fusedstep::cuda {

__device__ __forceinline__ int64_t entry_at(const RowIndex& index, int64_t position) {
  return index.order != nullptr ? index.order[position] : position;
}

__device__ __forceinline__ bool same_row(const RowIndex& index, int64_t entry, int64_t other) {
  for (int d = 0; d < index.dims; ++d) {
    if (index.at(d, entry) != index.at(d, other)) return false;
  }
  return true;
}

// An element of an entry: its place in the row, then in the operands.
template <int kOperands>
struct RowPlace {
  int64_t position;  // of the entry
  Offsets<kOperands> at;
};

// Makes a place in a row one in the operands; false if it is not the first entry for that row. An index that
// nothing has checked must lead to no memory of others.
template <int kOperands>
__device__ __forceinline__ bool find_row(const GradRows& rows, RowPlace<kOperands>& place) {
  const int64_t entry = entry_at(rows.index, place.position);
  if (place.position > 0 && same_row(rows.index, entry, entry_at(rows.index, place.position - 1))) {
    return false;
  }
  const int dims = rows.index.dims;
  for (int d = 0; d < dims; ++d) {
    const int64_t row = rows.index.at(d, entry);
    if (row < 0 || row >= rows.sizes[d]) __trap();
#pragma unroll
    for (int k = 0; k < kOperands; ++k) place.at.offset[k] += row * rows.strides[k * dims + d];
  }
  place.at.offset[kGrad] += entry * rows.elements;
  return true;
}

// The gradient at a place: the sum of the entries for its row, each addition rounded as memory holds it.
template <Reuse kReuse, class Stored, int N, int kOperands>
__device__ __forceinline__ void load_sum(const GradRows& rows, const Stored* grad,
                                         const RowPlace<kOperands>& place, ComputeOf<Stored> (&sum)[N]) {
  load<kReuse>(grad + place.at.offset[kGrad], sum);
  const int64_t first = entry_at(rows.index, place.position);
  for (int64_t next = place.position + 1; next < rows.index.entries; ++next) {
    const int64_t entry = entry_at(rows.index, next);
    if (!same_row(rows.index, entry, first)) break;
    ComputeOf<Stored> x[N];
    load<kReuse>(grad + place.at.offset[kGrad] + (entry - first) * rows.elements, x);
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] = Codec<Stored>::decode(Codec<Stored>::encode(sum[j] + x[j]));
  }
}

// Calls run(width, place) for the elements of a chunk that a thread has, of `threads` among which it is
// number `thread`, each of them the first of its row.
template <Access kAccess, int kWidth, int kOperands, class Run>
__device__ __forceinline__ void for_rows(const BlockLayout& layout, const GradRows& rows, const Chunk& chunk,
                                         int64_t thread, int64_t threads, const Run& run) {
  if constexpr (kAccess == kInWords) {  // no word is of two rows
    for (int64_t i = chunk.begin + thread * kWidth; i < chunk.end; i += threads * kWidth) {
      RowPlace<kOperands> place{i / rows.units, Offsets<kOperands>::flat(i % rows.units)};
      if (find_row(rows, place)) run(Width<kWidth>(), place);
    }
  } else {
    const bool is_flat = layout.sizes == nullptr;
    const int64_t per_unit = is_flat ? 1 : layout.extent[0] * layout.extent[1];
    for (int64_t i = thread; i < (chunk.end - chunk.begin) * per_unit; i += threads) {
      const int64_t unit = chunk.begin + i / per_unit;
      RowPlace<kOperands> place{unit / rows.units, Offsets<kOperands>::flat(unit % rows.units)};
      if (!is_flat) {
        place.at = Offsets<kOperands>::flat(0);
        const auto advance = [&](int dim, int64_t by) {
#pragma unroll
          for (int k = 0; k < kOperands; ++k) {
            place.at.offset[k] += by * layout.strides[k * layout.dims + dim];
          }
        };
        const int64_t row = i % per_unit / layout.extent[1], column = i % per_unit % layout.extent[1];
        const BlockSize size = seek(layout, unit % rows.units, advance);
        if (row >= size.rows || column >= size.columns) continue;
        advance(layout.dims - 2, row);
        advance(layout.dims - 1, column);
      }
      if (find_row(rows, place)) run(Width<1>(), place);
    }
  }
}

// Updates the rows of one part of a chunk.
template <Access kAccess, class Body>
__device__ __forceinline__ void update_rows(const Launch& launch, const Chunk& chunk, int part) {
  const Body body(launch, chunk);
  const GradRows& rows = *launch.grads[chunk.tensor].rows;
  constexpr int64_t kOf = kParts<kAccess, Body>;
  for_rows<kAccess, Body::kWidth, Body::kOperands>(
      launch.tensors[chunk.tensor].layout, rows, chunk, part * kThreads + threadIdx.x, kOf * kThreads,
      [&](auto width, const auto& place) {
        typename Body::template Read<decltype(width)::value> read;
        load<kOnce>(body.weight + place.at.offset[kWeight], read.weight);
        body.template load_states<kOnce>(place.at, read);
        load_sum<kOnce>(rows, body.grad, place, read.grad);
        body.work(place.at, read);
      });
}

// last_pass() for a step of which some gradients are sparse.
template <Access kAccess, class Body>
__global__ void __launch_bounds__(kThreads) last_pass_of_rows(const __grid_constant__ Launch launch) {
  constexpr int kOf = kParts<kAccess, Body>;
  const int part = static_cast<int>(blockIdx.x % kOf);
  const Chunk& chunk = launch.chunks[blockIdx.x / kOf].chunk;
  if (launch.grads[chunk.tensor].rows == nullptr) {
    go_over_part<kAccess, Body>(launch, chunk, part);
  } else if (!left_out(launch.found_inf)) {
    update_rows<kAccess, Body>(launch, chunk, part);
  }
}

template <Access kAccess, class Rule, class Weight, class State>
void launch_update_rows(const Launch& launch) {
  using Body = Update<Operands<Rule, Weight, State>>;
  launch_blocks(last_pass_of_rows<kAccess, Body>, launch.chunk_count * kParts<kAccess, Body>, launch.queue,
                launch);
}

}  // namespace fusedstep::cuda
