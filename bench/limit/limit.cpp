// The reads and writes of a step, as fast as a machine can make them: called by limit_library.py through
// ctypes.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "bench/limit/passes.h"
#include "src/run/session.h"

#define FUSEDSTEP_LIMIT_API extern "C" __attribute__((visibility("default")))

// The arrays of a step: weight, gradient and `states` arrays of each tensor. Sizes are the bytes by which a
// stream gets on with each element: even, those of weight and state as large as the gradient's or twice that.
struct fusedstep_limit_streams {
  int32_t states;  // up to 4
  int32_t weight_size, grad_size, state_size;
  int32_t two_phase;  // 0: one pass; 1: norms in a first pass, the update of the weight in a second
};

// The place of the arrays in memory.
struct fusedstep_limit_memory {
  int32_t huge_pages;
  int32_t offset;  // bytes by which the start of each stream in its page is apart from the one before; of 64
};

// The order and the threads in which the arrays are gone over.
struct fusedstep_limit_walk {
  int32_t threads;
  int32_t prefetch;       // elements ahead; 0: none
  int32_t take;           // true if a thread that is done steals from the others
  int32_t alternate;      // every other walk goes from the end to the beginning
  int32_t way;            // two-phase: index in kWays
  int32_t backward;       // two-phase: each thread takes its part of a wave the other way in the second pass
  int64_t wave_elements;  // two-phase: whole tensors that go through both passes together; 0: all
};

namespace fusedstep::limit {
namespace {

constexpr int64_t kLine = 64, kPage = 4096, kHugePage = int64_t{2} << 20;

// Chunks of the gradient: so many for each thread at least, that all have as much to do, in these bounds.
constexpr int64_t kChunksPerThread = 16, kLeastChunk = 1 << 10, kMostChunk = 64 << 10;

int64_t round_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

const PassTable& best_table() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    return avx512::kTable;
  }
  if (__builtin_cpu_supports("avx2")) return avx2::kTable;
#endif
  return base::kTable;
}

struct Unmap {
  int64_t bytes;
  void operator()(void* memory) const { munmap(memory, bytes); }
};
using Mapping = std::unique_ptr<void, Unmap>;

// Anonymous memory of `bytes` from any place in its first whole huge page on.
Mapping map_memory(int64_t bytes, bool huge_pages) {
  bytes = round_up(bytes, kPage) + 2 * kHugePage;
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  // Advice only: where it is not taken, the pages are as the system gives them.
  madvise(memory, bytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  return {memory, {bytes}};
}

// A piece of a tensor: bytes [begin, end) of the gradient.
struct Chunk {
  int64_t begin, end;
};

// Chunks of tensors that go through both passes together. `waits`: some are shared by threads, whose second
// pass waits for all first ones. Others get both passes at once.
struct Wave {
  size_t first, last;
  bool waits;
};

// Fills bytes [begin, end) of a stream with what depends on their place alone. Zeros would do for the memory,
// but not for seeing what was touched.
void fill_with_noise(unsigned char* stream, int64_t begin, int64_t end, int64_t seed) {
  for (int64_t at = begin; at < end; at += sizeof(uint64_t)) {
    auto word = static_cast<uint64_t>(at + seed) * 0x9e3779b97f4a7c15u;
    word = (word ^ word >> 29) * 0xbf58476d1ce4e5b9u;
    std::memcpy(stream + at, &word, std::min<int64_t>(sizeof(word), end - at));
  }
}

// Ways of a two-phase step to bring the update from one pass to the next.
constexpr std::pair<PassId, PassId> kWays[] = {
    {kAccumulateStore, kApplyStored},  // store: keeps it in the gradient's memory
    {kAccumulate, kApplyRecompute},    // recompute: from states that the first pass has written
    {kRead, kUpdate}};                 // twice: computes all again, the first pass only reads

// The arrays of a step over a list of tensors, and the walks over them. Places are counted in bytes of the
// gradient.
class Step {
 public:
  Step(const fusedstep_limit_streams& streams, const fusedstep_limit_memory& memory, int64_t tensors,
       const int64_t* elements, int threads)
      : streams_(streams),
        strides_{streams.weight_size / streams.grad_size, streams.state_size / streams.grad_size},
        passes_(best_table().pass[index_of(strides_)][streams.states]) {
    for (int64_t tensor = 0; tensor < tensors; ++tensor) bytes_ += elements[tensor] * streams_.grad_size;
    const int64_t chunk_bytes =
        std::clamp(round_up(bytes_ / (kChunksPerThread * threads), kLine), kLeastChunk, kMostChunk);
    int64_t end = 0;
    for (int64_t tensor = 0; tensor < tensors; ++tensor) {
      const int64_t begin = round_up(end, kLine);
      end = begin + elements[tensor] * streams_.grad_size;
      for (int64_t at = begin; at < end; at += chunk_bytes)
        chunks_.push_back({at, std::min(at + chunk_bytes, end)});
      last_chunks_.push_back(chunks_.size());
    }
    const int count = kFirstState + streams_.states;
    for (int i = 0; i < count; ++i) {
      mappings_.push_back(map_memory(end * stride_of(strides_, i), memory.huge_pages != 0));
      const auto start = reinterpret_cast<uintptr_t>(mappings_.back().get());
      const int64_t page = round_up(static_cast<int64_t>(start), kHugePage);
      data_[i] = reinterpret_cast<unsigned char*>(page) + i * memory.offset % kHugePage;
    }
    cost_.reserve(chunks_.size() + 1);
    for (const Chunk& chunk : chunks_) cost_.push_back(chunk.begin);
    cost_.push_back(end);
    auto fill = [&](int64_t first, int64_t last) {
      for (int i = 0; i < count; ++i) {
        const int64_t stride = stride_of(strides_, i);
        for (int64_t c = first; c < last; ++c) {
          fill_with_noise(data_[i], chunks_[c].begin * stride, chunks_[c].end * stride, i + 1);
        }
      }
    };
    run_session(threads, cost_, fill);
  }

  void walk(const fusedstep_limit_walk& how) {
    const bool turned = how.alternate != 0 && walks_++ % 2 != 0;
    const std::vector<Wave>& waves = waves_of(streams_.two_phase == 0 ? 0 : how.wave_elements);
    const int64_t ahead = static_cast<int64_t>(how.prefetch) * streams_.grad_size;
    const auto [first_pass, second_pass] = kWays[how.way];
    struct Part {
      size_t first_chunk;
      PassId pass, then;
    };
    std::vector<Stage> stages;
    std::vector<Part> parts;
    const auto add = [&](const Wave& wave, bool waits, bool backwards, PassId pass, PassId then = kPasses) {
      const std::span cost = std::span(cost_).subspan(wave.first, wave.last - wave.first + 1);
      stages.push_back({cost, waits, backwards});
      parts.push_back({wave.first, pass, then});
    };
    for (size_t i = 0; i < waves.size(); ++i) {
      const Wave& wave = waves[turned ? waves.size() - 1 - i : i];
      if (streams_.two_phase == 0) {
        add(wave, false, turned, kUpdate);
      } else if (!wave.waits) {
        add(wave, false, turned, first_pass, second_pass);
      } else {
        add(wave, false, turned, first_pass);
        add(wave, true, turned != (how.backward != 0), second_pass);
      }
    }
    balance_.may_steal = how.take != 0;
    std::atomic<uint16_t> sum = 0;
    auto work = [&](size_t stage, Pieces& pieces) {
      const auto [first_chunk, pass, then] = parts[stage];
      uint16_t own = 0;
      for (int64_t begin, end; pieces.next(begin, end);) {
        for (int64_t i = begin; i < end; ++i) {
          const Chunk& chunk = chunks_[first_chunk + i];
          own ^= passes_[pass](data_, chunk.begin, chunk.end, ahead);
          if (then != kPasses) own ^= passes_[then](data_, chunk.begin, chunk.end, ahead);
        }
      }
      sum ^= own;
    };
    run_stages(how.threads, stages, work, {}, &balance_);
    sum_ ^= sum;
  }

  int64_t traffic(int way) const {
    const auto of = [&](PassId pass) {
      const Streams streams = streams_of(pass, streams_.states);
      int64_t strides = 0;
      for (int i = 0; i < kMaxStreams; ++i) {
        strides += ((streams.reads >> i & 1) + (streams.writes >> i & 1)) * stride_of(strides_, i);
      }
      return bytes_ * strides;
    };
    return streams_.two_phase == 0 ? of(kUpdate) : of(kWays[way].first) + of(kWays[way].second);
  }

  unsigned char* data(int stream) const { return data_[stream]; }
  uint16_t sum() const { return sum_; }

 private:
  // Whole tensors, as many as have `wave_elements` together; all of them for 0. Those of the last call are
  // kept.
  const std::vector<Wave>& waves_of(int64_t wave_elements) {
    if (!waves_.empty() && wave_elements == wave_elements_) return waves_;
    wave_elements_ = wave_elements;
    waves_.clear();
    for (size_t tensor = 0, first = 0; tensor < last_chunks_.size(); first = waves_.back().last) {
      bool waits = false;  // only tensors of several chunks: others are one thread's from the beginning
      const int64_t most = chunks_[first].begin + wave_elements * streams_.grad_size;
      do {
        const size_t first_chunk = tensor == 0 ? 0 : last_chunks_[tensor - 1];
        waits = waits || last_chunks_[tensor] > first_chunk + 1;
        ++tensor;
      } while (tensor < last_chunks_.size() &&
               (wave_elements == 0 || chunks_[last_chunks_[tensor] - 1].end <= most));
      const size_t last = last_chunks_[tensor - 1];
      waves_.push_back({first, last, waits});
    }
    return waves_;
  }

  fusedstep_limit_streams streams_;
  Strides strides_;
  const Pass* passes_;
  int64_t bytes_ = 0;  // of the gradient, without the gaps between tensors
  std::vector<Chunk> chunks_;
  std::vector<int64_t> cost_;  // where each begins
  LoadBalance balance_;
  std::vector<size_t> last_chunks_;  // one past the last chunk of each tensor
  int64_t wave_elements_ = 0;
  std::vector<Wave> waves_;
  uint64_t walks_ = 0;
  uint16_t sum_ = 0;
  std::vector<Mapping> mappings_;
  unsigned char* data_[kMaxStreams] = {};
};

}  // namespace
}  // namespace fusedstep::limit

struct fusedstep_limit {
  fusedstep::limit::Step step;
};

// `elements[i]` is the size of tensor i. Memory is first touched by the thread, of `threads`, that a walk on
// as many goes over it with while shares are equal. Null if there is not enough memory.
FUSEDSTEP_LIMIT_API fusedstep_limit* fusedstep_limit_new(const fusedstep_limit_streams* streams,
                                                         const fusedstep_limit_memory* memory,
                                                         int64_t tensors, const int64_t* elements,
                                                         int32_t threads) try {
  return new fusedstep_limit{{*streams, *memory, tensors, elements, threads}};
} catch (const std::bad_alloc&) {
  return nullptr;
}

FUSEDSTEP_LIMIT_API void fusedstep_limit_delete(fusedstep_limit* limit) { delete limit; }

// Walks `repetitions` times; seconds[i] is the duration of one.
FUSEDSTEP_LIMIT_API void fusedstep_limit_run(fusedstep_limit* limit, const fusedstep_limit_walk* walk,
                                             int64_t repetitions, double* seconds) {
  using Clock = std::chrono::steady_clock;
  for (int64_t i = 0; i < repetitions; ++i) {
    const Clock::time_point began = Clock::now();
    limit->step.walk(*walk);
    seconds[i] = std::chrono::duration<double>(Clock::now() - began).count();
  }
}

// Bytes read plus bytes written by one walk in a way.
FUSEDSTEP_LIMIT_API int64_t fusedstep_limit_traffic(const fusedstep_limit* limit, int32_t way) {
  return limit->step.traffic(way);
}

// The memory of one stream: the tensors one after the other, each at a multiple of 64 bytes.
FUSEDSTEP_LIMIT_API void* fusedstep_limit_data(const fusedstep_limit* limit, int32_t stream) {
  return limit->step.data(stream);
}

// The exclusive or, in words of two bytes, of all that passes without writes have read.
FUSEDSTEP_LIMIT_API uint16_t fusedstep_limit_sum(const fusedstep_limit* limit) { return limit->step.sum(); }

// The instruction set of the loops: "avx512", "avx2" or "base".
FUSEDSTEP_LIMIT_API const char* fusedstep_limit_isa() { return fusedstep::limit::best_table().isa; }
