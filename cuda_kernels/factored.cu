// A step of weights with factored second moments: each phase in one launch for all tensors. A warp has a tile
// of a matrix; each of its threads has columns kTileLanes apart, which are a lane of the sums along rows.
#include "cuda_kernels/factored.h"

#include "cuda_kernels/reduce.cuh"

namespace fusedstep::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp, kColumnsOfThread = kTileColumns / kTileLanes;
static_assert(kTileLanes == kWarp && kMeanRows == kWarp);

// Blocks of threads that a multiprocessor is to hold. More of them gain more than more rows at a time do.
template <class Stored>
constexpr int kTilesResident = sizeof(ComputeOf<Stored>) == sizeof(float) ? 4 : 1;

__device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / kWarp; }
__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

// Returns whether the step is taken.
__device__ __forceinline__ bool enter(const FactoredLaunch& launch) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  return !left_out(launch.found_inf);
}

__device__ __forceinline__ const FactoredOptions& options_of(const FactoredLaunch& launch,
                                                             const FactoredTask& task) {
  return launch.options[task.options];
}

template <class T>
__device__ __forceinline__ T grad_factor_of(const FactoredLaunch& launch, const FactoredTask& task) {
  const double more = launch.more_factor != nullptr ? *launch.more_factor : 1.0;
  return static_cast<T>(options_of(launch, task).grad_factor * more);
}

// The sum of what a warp's threads have, in a tree: in the first.
__device__ __forceinline__ double sum_of_warp(double x) {
#pragma unroll
  for (int width = kWarp / 2; width > 0; width /= 2) x += __shfl_down_sync(0xffffffffu, x, width, kWarp);
  return x;
}

// A warp's tile.
struct Tile {
  const FactoredTask& task;
  int64_t index, matrix, row, column;  // of its first element
  int rows, columns;                   // that it has
  int left;                            // of the columns, those that the thread has

  __device__ Tile(const FactoredTask& task_, int64_t index_) : task(task_), index(index_) {
    const int64_t column_tile = index % task.column_tiles, above = index / task.column_tiles;
    matrix = above / task.row_tiles;
    row = above % task.row_tiles * kTileRows;
    column = column_tile * kTileColumns;
    rows = static_cast<int>(task.rows - row < kTileRows ? task.rows - row : kTileRows);
    columns = static_cast<int>(task.columns - column < kTileColumns ? task.columns - column : kTileColumns);
    left = (columns - lane() + kTileLanes - 1) / kTileLanes;
  }

  // The first element of a thread in an operand.
  template <class Stored>
  __device__ Stored* first(const FactoredArray& of) const {
    int64_t offset = row * of.row + (column + lane()) * of.column, number = matrix;
    for (int d = task.outer_dims - 1; d >= 0; --d) {
      offset += number % task.outer_sizes[d] * of.outer[d];
      number /= task.outer_sizes[d];
    }
    return static_cast<Stored*>(of.data) + offset;
  }
};

// The way from an element of a thread to its next where rows are contiguous, which a compiler then knows.
struct Contiguous {
  static __device__ __forceinline__ constexpr int64_t step(const FactoredArray&) { return kTileLanes; }
};
struct Strided {
  static __device__ __forceinline__ int64_t step(const FactoredArray& of) { return of.column * kTileLanes; }
};

// A thread's elements of a tile.
template <class Stored, class Way>
class TileElements {
 public:
  using T = ComputeOf<Stored>;

  __device__ TileElements(const Tile& tile, const FactoredArray& of)
      : first_(tile.first<Stored>(of)), row_(of.row), of_(of), left_(tile.left) {}

  // Elements beyond the tile are zero.
  __device__ __forceinline__ void load(int row, T (&x)[kColumnsOfThread], T factor = 1) const {
    const Stored* const from = first_ + row * row_;
    const int64_t step = Way::step(of_);
#pragma unroll
    for (int k = 0; k < kColumnsOfThread; ++k) {
      x[k] = k < left_ ? Codec<Stored>::decode(from[k * step]) * factor : T{0};
    }
  }
  __device__ __forceinline__ void store(int row, const T (&x)[kColumnsOfThread]) const {
    Stored* const to = first_ + row * row_;
    const int64_t step = Way::step(of_);
#pragma unroll
    for (int k = 0; k < kColumnsOfThread; ++k) {
      if (k < left_) to[k * step] = Codec<Stored>::encode(x[k]);
    }
  }

 private:
  Stored* first_;
  int64_t row_;
  const FactoredArray& of_;
  int left_;
};

// Calls body(tile, way) for the warp's unit, if there is one. `backwards`: the last come first, for they are
// those that the pass before has left in the cache.
template <class Body>
__device__ __forceinline__ void for_tile(const FactoredLaunch& launch, bool backwards, const Body& body) {
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kWarps + warp();
  if (number >= launch.unit_count) return;
  const FactoredUnit unit = launch.units[backwards ? launch.unit_count - 1 - number : number];
  const FactoredTask& task = launch.tasks[unit.tensor];
  const Tile tile(task, unit.index);
  if (task.weight.column == 1 && task.grad.column == 1 && task.moment.column == 1) {
    body(tile, Contiguous());
  } else {
    body(tile, Strided());
  }
}

template <class Grad>
__global__ void __launch_bounds__(kThreads, kTilesResident<Grad>)
    sums_kernel(const __grid_constant__ FactoredLaunch launch) {
  if (!enter(launch)) return;
  for_tile(launch, false, [&](const Tile& tile, auto way) {
    using Way = decltype(way);
    using T = ComputeOf<Grad>;
    const FactoredTask& task = tile.task;
    const TileElements<Grad, Way> grads(tile, task.grad);
    const T factor = grad_factor_of<T>(launch, task);
    double* const row_sums =
        task.row_sums + (tile.matrix * task.column_tiles + tile.column / kTileColumns) * task.rows + tile.row;
    T columns[kColumnsOfThread] = {};
    const auto add_row = [&](int row, const T(&x)[kColumnsOfThread]) {
      T of_row = 0;
#pragma unroll
      for (int k = 0; k < kColumnsOfThread; ++k) {
        of_row = with_square(of_row, x[k]);
        columns[k] = with_square(columns[k], x[k]);
      }
      const double sum = sum_of_warp(static_cast<double>(of_row));
      if (lane() == 0) row_sums[row] = sum;
    };
#pragma unroll 1
    for (int row = 0; row < tile.rows; row += 2) {
      T x[2][kColumnsOfThread];
      const bool has_next = row + 1 < tile.rows;
      grads.load(row, x[0], factor);
      if (has_next) grads.load(row + 1, x[1], factor);
      add_row(row, x[0]);
      if (has_next) add_row(row + 1, x[1]);
    }
    T* const column_sums = static_cast<T*>(task.column_sums) +
                           (tile.matrix * task.row_tiles + tile.row / kTileRows) * task.columns + tile.column;
#pragma unroll
    for (int k = 0; k < kColumnsOfThread; ++k) {
      if (k < tile.left) column_sums[lane() + k * kTileLanes] = columns[k];
    }
  });
}

// Sums of one matrix that a block takes into moments.
template <class T, class Sum>
struct MomentSums {
  T* moments;
  const Sum* sums;  // [tiles][moments]
  int64_t count, tiles, terms;
  double* mean_sums;  // null: none are asked for
  double* totals;     // null: the sums are taken into moments; else they are left here
};

template <class T, class Sum>
__device__ __forceinline__ double sum_group(const MomentSums<T, Sum>& of, int64_t moment, int64_t group) {
  const int64_t first = group * kPartialsGroup;
  Sum found[kPartialsGroup];
#pragma unroll
  for (int i = 0; i < kPartialsGroup; ++i) {
    found[i] = first + i < of.tiles ? __ldcg(of.sums + (first + i) * of.count + moment) : Sum{0};
  }
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kPartialsGroup; ++i) sum += static_cast<double>(found[i]);
  return sum;
}

// For whole warps.
template <class T, class Sum>
__device__ __forceinline__ void take_moment(const FactoredOptions& options, const MomentSums<T, Sum>& of,
                                            int64_t moment, double sum) {
  if (of.totals != nullptr) {
    if (moment < of.count) of.totals[moment] = sum;
    return;
  }
  double next = 0;
  if (moment < of.count) {
    const T x = next_moment(options, of.moments[moment], sum, of.terms);
    of.moments[moment] = x;
    next = static_cast<double>(x);
  }
  if (of.mean_sums == nullptr) return;
  next = sum_of_warp(next);
  if (lane() == 0 && moment < of.count) of.mean_sums[moment / kMeanRows * kPartials] = next;
}

template <class T, class Sum>
__device__ __forceinline__ void take_moments(const FactoredOptions& options, const MomentSums<T, Sum>& of,
                                             int64_t unit) {
  const int64_t first = unit * moments_of_unit(of.tiles);
  if (of.tiles <= kPartialsGroup) {
    const int64_t moment = first + threadIdx.x;
    take_moment(options, of, moment, moment < of.count ? sum_group(of, moment, 0) : 0.0);
    return;
  }
  // A warp sums a group; the first adds them up.
  __shared__ double groups[kWarps][kWarp];
  const int64_t moment = first + lane(), count = (of.tiles + kPartialsGroup - 1) / kPartialsGroup;
  double total = 0;
  for (int64_t round = 0; round < count; round += kWarps) {
    const int64_t group = round + warp();
    groups[warp()][lane()] = moment < of.count && group < count ? sum_group(of, moment, group) : 0.0;
    __syncthreads();
    if (warp() == 0) {
#pragma unroll
      for (int i = 0; i < kWarps; ++i) total += groups[i][lane()];
    }
    __syncthreads();
  }
  if (warp() == 0) take_moment(options, of, moment, total);
}

template <class T>
__device__ __forceinline__ void take_moments(const FactoredLaunch& launch, const FactoredTask& task,
                                             int64_t unit) {
  // Sums over all processes are as those of one tile.
  const bool is_given = launch.part == FactoredPart::kRows || launch.part == FactoredPart::kNorms;
  const bool is_asked = launch.part == FactoredPart::kSums;
  const int64_t of_rows = task.row_moments ? moment_units(task.rows, is_given ? 1 : task.column_tiles) : 0;
  if (unit < task.count * of_rows) {
    const int64_t matrix = unit / of_rows, means = (task.rows + kMeanRows - 1) / kMeanRows;
    double* const share = task.share_of_rows + matrix * task.rows;
    const MomentSums<T, double> of{static_cast<T*>(task.row_moments) + matrix * task.rows,
                                   is_given ? share : task.row_sums + matrix * task.column_tiles * task.rows,
                                   task.rows,
                                   is_given ? 1 : task.column_tiles,
                                   task.whole.columns,
                                   task.mean_sums + matrix * means * kPartials,
                                   is_asked ? share : nullptr};
    take_moments(options_of(launch, task), of, unit % of_rows);
    return;
  }
  const int64_t of_columns = moment_units(task.columns, is_given ? 1 : task.row_tiles);
  const int64_t matrix = (unit - task.count * of_rows) / of_columns,
                in_matrix = (unit - task.count * of_rows) % of_columns;
  T* const moments = static_cast<T*>(task.column_moments) + matrix * task.columns;
  double* const share = task.share_of_columns + matrix * task.columns;
  if (is_given) {
    const MomentSums<T, double> of{moments, share, task.columns, 1, task.whole.rows, nullptr, nullptr};
    take_moments(options_of(launch, task), of, in_matrix);
    return;
  }
  const MomentSums<T, T> of{moments,
                            static_cast<const T*>(task.column_sums) + matrix * task.row_tiles * task.columns,
                            task.columns,
                            task.row_tiles,
                            task.whole.rows,
                            nullptr,
                            is_asked ? share : nullptr};
  take_moments(options_of(launch, task), of, in_matrix);
}

__global__ void __launch_bounds__(kThreads) moments_kernel(const __grid_constant__ FactoredLaunch launch) {
  if (!enter(launch)) return;
  const FactoredUnit unit = launch.units[blockIdx.x];
  const FactoredTask& task = launch.tasks[unit.tensor];
  if (task.as_double) {
    take_moments<double>(launch, task, unit.index);
  } else {
    take_moments<float>(launch, task, unit.index);
  }
}

// Runs as one warp a matrix.
__global__ void means_kernel(const __grid_constant__ FactoredLaunch launch) {
  if (!enter(launch)) return;
  const FactoredUnit unit = launch.units[blockIdx.x];
  const FactoredTask& task = launch.tasks[unit.tensor];
  if (launch.part == FactoredPart::kNorms || launch.part == FactoredPart::kApply) {
    const double given = task.share_of_means[unit.index];
    if (lane() == 0) task.means[unit.index] = mean_of_rows(options_of(launch, task), given, task.whole.rows);
    return;
  }
  const int64_t parts = (task.rows + kMeanRows - 1) / kMeanRows;
  const double sum = sum_partials<1, WarpTeam>(task.mean_sums + unit.index * parts * kPartials, parts).of[0];
  if (lane() != 0) return;
  if (launch.part == FactoredPart::kRows) {
    task.share_of_means[unit.index] = sum;
  } else {
    task.means[unit.index] = mean_of_rows(options_of(launch, task), sum, task.whole.rows);
  }
}

__global__ void __launch_bounds__(kThreads) lengths_kernel(const __grid_constant__ FactoredLaunch launch) {
  if (!enter(launch)) return;
  const FactoredTask& task = launch.tasks[blockIdx.x];
  const bool is_given = launch.part == FactoredPart::kApply;
  const Sums<2> norms2 =
      sum_partials<2, BlockTeam>(is_given ? task.share_of_norms : task.norms,
                                 is_given ? 1 : task.count * task.row_tiles * task.column_tiles);
  if (threadIdx.x != 0) return;
  if (launch.part == FactoredPart::kNorms) {
    for (int which = 0; which < 2; ++which) task.share_of_norms[which] = norms2.of[which];
  } else {
    *task.lengths = lengths_of(options_of(launch, task), norms2.of[0], norms2.of[1],
                               static_cast<double>(task.whole.elements));
  }
}

// The update of a thread's elements of a tile.
template <class T>
class Update {
 public:
  __device__ Update(const FactoredLaunch& launch, const Tile& tile)
      : most_(options_of(launch, tile.task).most) {
    const FactoredTask& task = tile.task;
    const T* const columns =
        static_cast<const T*>(task.column_moments) + tile.matrix * task.columns + tile.column + lane();
#pragma unroll
    for (int k = 0; k < kColumnsOfThread; ++k) {
      columns_[k] = k < tile.left ? factor_of(columns[k * kTileLanes], T{1}) : T{0};
    }
    // In memory of the warp's own.
    __shared__ T factors[kWarps][kTileRows];
    rows_ = factors[warp()];
    const T* const rows = static_cast<const T*>(task.row_moments) + tile.matrix * task.rows + tile.row;
    const T mean = task.row_moments ? static_cast<T>(task.means[tile.matrix]) : T{1};
    for (int row = lane(); row < tile.rows; row += kWarp) {
      rows_[row] = task.row_moments ? factor_of(rows[row], mean) : T{1};
    }
    __syncwarp();
  }

  __device__ __forceinline__ T operator()(int row, int k, T grad) const {
    const T factor = rows_[row] * columns_[k];
    return grad * (most_ < factor ? most_ : factor);  // a factor that is NaN stays
  }

 private:
  T most_, columns_[kColumnsOfThread];
  T* rows_;
};

template <class Weight, class Grad>
__global__ void __launch_bounds__(kThreads, kTilesResident<Weight>)
    norms_kernel(const __grid_constant__ FactoredLaunch launch) {
  if (!enter(launch)) return;
  for_tile(launch, true, [&](const Tile& tile, auto way) {
    using Way = decltype(way);
    using T = ComputeOf<Weight>;
    const TileElements<Weight, Way> weights(tile, tile.task.weight);
    const TileElements<Grad, Way> grads(tile, tile.task.grad);
    const Update<T> update(launch, tile);
    const T factor = grad_factor_of<T>(launch, tile.task);
    const bool needs_weights = options_of(launch, tile.task).scaled != 0;
    double of_weight = 0, of_update = 0;
#pragma unroll 1
    for (int row = 0; row < tile.rows; ++row) {
      T w[kColumnsOfThread] = {}, g[kColumnsOfThread];
      if (needs_weights) weights.load(row, w);
      grads.load(row, g, factor);
      T weight_sum = 0, update_sum = 0;
#pragma unroll
      for (int k = 0; k < kColumnsOfThread; ++k) {
        weight_sum = with_square(weight_sum, w[k]);
        if (k < tile.left) update_sum = with_square(update_sum, update(row, k, g[k]));
      }
      of_weight += static_cast<double>(weight_sum);
      of_update += static_cast<double>(update_sum);
    }
    of_weight = sum_of_warp(of_weight);
    of_update = sum_of_warp(of_update);
    if (lane() == 0) {
      tile.task.norms[tile.index * kPartials] = of_weight;
      tile.task.norms[tile.index * kPartials + 1] = of_update;
    }
  });
}

template <class Weight, class Grad>
__global__ void __launch_bounds__(kThreads, kTilesResident<Weight>)
    apply_kernel(const __grid_constant__ FactoredLaunch launch) {
  if (!enter(launch)) return;
  for_tile(launch, false, [&](const Tile& tile, auto way) {
    using Way = decltype(way);
    using T = ComputeOf<Weight>;
    using rules::mul_add;
    const FactoredTask& task = tile.task;
    const TileElements<Weight, Way> weights(tile, task.weight);
    const TileElements<Grad, Way> grads(tile, task.grad);
    const TileElements<T, Way> moments(tile, task.moment);
    const bool averages = task.moment.data != nullptr;
    const Update<T> update(launch, tile);
    const FactoredLengths lengths = *task.lengths;
    const double average = options_of(launch, task).beta;
    const T factor = grad_factor_of<T>(launch, task), keep = static_cast<T>(lengths.keep),
            step = static_cast<T>(lengths.step), beta = static_cast<T>(average),
            one_minus_beta = static_cast<T>(1 - average);
#pragma unroll 1
    for (int row = 0; row < tile.rows; ++row) {
      T w[kColumnsOfThread], move[kColumnsOfThread];
      weights.load(row, w);
      grads.load(row, move, factor);
#pragma unroll
      for (int k = 0; k < kColumnsOfThread; ++k) move[k] = update(row, k, move[k]) * step;
      if (averages) {
        T m[kColumnsOfThread];
        moments.load(row, m);
#pragma unroll
        for (int k = 0; k < kColumnsOfThread; ++k) {
          move[k] = mul_add(one_minus_beta, move[k], beta * m[k]);
        }
        moments.store(row, move);
      }
#pragma unroll
      for (int k = 0; k < kColumnsOfThread; ++k) w[k] = w[k] * keep - move[k];
      weights.store(row, w);
    }
  });
}

void launch_tiles(void (*kernel)(const FactoredLaunch), const FactoredLaunch& launch) {
  launch_blocks(kernel, (launch.unit_count + kWarps - 1) / kWarps, launch.queue, launch);
}

}  // namespace

const FactoredPasses& factored_passes(FactoredFormat format) {
#define FUSEDSTEP_PASSES(name, Weight, Grad)                                               \
  {[](const FactoredLaunch& launch) { launch_tiles(sums_kernel<Grad>, launch); },          \
   [](const FactoredLaunch& launch) { launch_tiles(norms_kernel<Weight, Grad>, launch); }, \
   [](const FactoredLaunch& launch) { launch_tiles(apply_kernel<Weight, Grad>, launch); }},
  static const FactoredPasses passes[] = {FUSEDSTEP_FACTORED_FORMATS(FUSEDSTEP_PASSES)};
#undef FUSEDSTEP_PASSES
  return passes[static_cast<int>(format)];
}

void launch_moments(const FactoredLaunch& launch) {
  launch_blocks(moments_kernel, launch.unit_count, launch.queue, launch);
}
void launch_means(const FactoredLaunch& launch) {
  launch_with_memory(means_kernel, launch.unit_count, kWarp, 0, launch.queue, launch);
}
void launch_lengths(const FactoredLaunch& launch) {
  launch_blocks(lengths_kernel, launch.unit_count, launch.queue, launch);
}

}  // namespace fusedstep::cuda
