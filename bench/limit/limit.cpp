#include "bench/limit/limit.h"

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <memory>
#include <new>
#include <vector>

#include "bench/limit/passes.h"

namespace fusedstep::limit {
namespace {

constexpr int64_t kLine = 64, kPage = 4096, kHugePage = int64_t{2} << 20;
constexpr int64_t kChunkBytes = 64 << 10;

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

// Anonymous memory that starts at an offset in its page.
class Mapping {
 public:
  Mapping(int64_t bytes, int64_t offset, bool huge_pages)
      : bytes_(round_up(bytes, kPage) + kHugePage + kPage) {
    mapped_ =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    // Advice only: where it is not taken, the pages are as the system gives them.
    madvise(mapped_, bytes_, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(mapped_));
    data_ = static_cast<unsigned char*>(mapped_) + (round_up(address, kHugePage) - address) + offset;
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { munmap(mapped_, bytes_); }

  unsigned char* data() const { return data_; }

 private:
  int64_t bytes_;
  void* mapped_;
  unsigned char* data_;
};

// A piece of a tensor: bytes [begin, end) of every stream.
struct Chunk {
  int64_t begin, end;
};

// Zeros would do for the memory, but not for seeing what was touched.
void fill_with_noise(unsigned char* begin, int64_t bytes, int64_t seed) {
  auto value = static_cast<uint32_t>(2654435769u * (seed + 1));
  for (unsigned char* at = begin; at < begin + bytes; at += 2) {
    value = value * 1664525u + 1013904223u;
    at[0] = static_cast<unsigned char>(value >> 24);
    at[1] = static_cast<unsigned char>(value >> 16);
  }
}

// One pass over chunks [first, last): each thread takes one run of neighbours of about equal size, always the
// same for the same number of threads.
template <class Work>
void session(int threads, const std::vector<Chunk>& chunks, size_t first, size_t last, bool backward,
             Work work) {
  const int64_t begin = chunks[first].begin, bytes = chunks[last - 1].end - begin;
  const auto run = [&](int thread, int team) {
    const auto boundary = [&](int part) {
      const int64_t at = begin + bytes * part / team;
      const auto found =
          std::lower_bound(chunks.begin() + first, chunks.begin() + last, at,
                           [](const Chunk& chunk, int64_t value) { return chunk.begin < value; });
      return static_cast<size_t>(found - chunks.begin());
    };
    const size_t from = boundary(thread), to = thread + 1 == team ? last : boundary(thread + 1);
    if (backward) {
      for (size_t i = to; i > from; --i) work(chunks[i - 1]);
    } else {
      for (size_t i = from; i < to; ++i) work(chunks[i]);
    }
  };
  if (threads == 1) return run(0, 1);
#pragma omp parallel num_threads(threads)
  run(omp_get_thread_num(), omp_get_num_threads());
}

// The arrays of a step over a list of tensors, and the walks over them.
class Step {
 public:
  Step(const fusedstep_limit_streams& streams, const fusedstep_limit_memory& memory, int64_t tensors,
       const int64_t* elements, int threads)
      : streams_(streams), passes_(best_table().pass[streams.states]) {
    int64_t end = 0;
    for (int64_t tensor = 0; tensor < tensors; ++tensor) {
      const int64_t begin = round_up(end, kLine);
      end = begin + elements[tensor] * streams_.element_size;
      for (int64_t at = begin; at < end; at += kChunkBytes)
        chunks_.push_back({at, std::min(at + kChunkBytes, end)});
      last_chunks_.push_back(chunks_.size());
      bytes_ += end - begin;
    }
    const int count = kFirstState + streams_.states;
    for (int i = 0; i < count; ++i) {
      mappings_.push_back(std::make_unique<Mapping>(end, i * memory.offset % kPage, memory.huge_pages != 0));
      data_[i] = mappings_.back()->data();
    }
    const auto fill = [&](const Chunk& chunk) {
      for (int i = 0; i < count; ++i)
        fill_with_noise(data_[i] + chunk.begin, chunk.end - chunk.begin, chunk.begin + i);
    };
    session(threads, chunks_, 0, chunks_.size(), false, fill);
  }

  void walk(const fusedstep_limit_walk& how) const {
    if (streams_.two_phase == 0) return pass(kUpdate, how, 0, chunks_.size(), false);
    size_t first = 0;
    for (size_t tensor = 0; tensor < last_chunks_.size();) {
      tensor = wave_end(tensor, first, how.wave_elements);
      const size_t last = last_chunks_[tensor - 1];
      pass(how.store != 0 ? kAccumulateStore : kAccumulate, how, first, last, false);
      pass(how.store != 0 ? kApplyStored : kApplyRecompute, how, first, last, how.backward != 0);
      first = last;
    }
  }

  int64_t traffic(bool store) const {
    const auto of = [&](PassId pass) {
      const Streams streams = streams_of(pass, streams_.states);
      return bytes_ * (std::popcount(streams.reads) + std::popcount(streams.writes));
    };
    if (streams_.two_phase == 0) return of(kUpdate);
    return store ? of(kAccumulateStore) + of(kApplyStored) : of(kAccumulate) + of(kApplyRecompute);
  }

  unsigned char* data(int stream) const { return data_[stream]; }

 private:
  void pass(PassId id, const fusedstep_limit_walk& how, size_t first, size_t last, bool backward) const {
    const int64_t ahead = static_cast<int64_t>(how.prefetch) * streams_.element_size;
    session(how.threads, chunks_, first, last, backward,
            [&](const Chunk& chunk) { passes_[id](data_, chunk.begin, chunk.end, ahead); });
  }

  // One past the last tensor of the wave that begins with `tensor`, whose chunks begin at `first`.
  size_t wave_end(size_t tensor, size_t first, int64_t wave_elements) const {
    if (wave_elements == 0) return last_chunks_.size();
    const int64_t limit = chunks_[first].begin + wave_elements * streams_.element_size;
    do {
      ++tensor;
    } while (tensor < last_chunks_.size() && chunks_[last_chunks_[tensor] - 1].end <= limit);
    return tensor;
  }

  fusedstep_limit_streams streams_;
  const Pass* passes_;
  int64_t bytes_ = 0;  // of one stream, without the gaps between tensors
  std::vector<Chunk> chunks_;
  std::vector<size_t> last_chunks_;  // one past the last chunk of each tensor
  std::vector<std::unique_ptr<Mapping>> mappings_;
  unsigned char* data_[kMaxStreams] = {};
};

}  // namespace
}  // namespace fusedstep::limit

struct fusedstep_limit {
  fusedstep::limit::Step step;
};

fusedstep_limit* fusedstep_limit_new(const fusedstep_limit_streams* streams,
                                     const fusedstep_limit_memory* memory, int64_t tensors,
                                     const int64_t* elements, int32_t threads) try {
  return new fusedstep_limit{{*streams, *memory, tensors, elements, threads}};
} catch (const std::bad_alloc&) {
  return nullptr;
}

void fusedstep_limit_delete(fusedstep_limit* limit) { delete limit; }

void fusedstep_limit_run(fusedstep_limit* limit, const fusedstep_limit_walk* walk, int64_t repetitions,
                         double* seconds) {
  using Clock = std::chrono::steady_clock;
  for (int64_t i = 0; i < repetitions; ++i) {
    const Clock::time_point began = Clock::now();
    limit->step.walk(*walk);
    seconds[i] = std::chrono::duration<double>(Clock::now() - began).count();
  }
}

int64_t fusedstep_limit_traffic(const fusedstep_limit* limit, int32_t store) {
  return limit->step.traffic(store != 0);
}

void* fusedstep_limit_data(const fusedstep_limit* limit, int32_t stream) { return limit->step.data(stream); }

const char* fusedstep_limit_isa() { return fusedstep::limit::best_table().isa; }
