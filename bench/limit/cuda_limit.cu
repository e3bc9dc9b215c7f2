// The reads and writes of a step on a GPU, as fast as can be: called by devices.py through ctypes. As in
// limit.cpp, the streams are weight, gradient and states; each stream that is written becomes its exclusive
// or with the gradient, which is only read, so that no load can be left out.
#include <cuda_runtime_api.h>

#include <cstdint>

namespace {

constexpr int kMaxStates = 4, kThreads = 512;

struct Streams {
  const uint4* grad;
  uint4* written[1 + kMaxStates];  // the weight, the states
};

// kBatch words of each stream are asked for before the first is used.
template <int kStates, int kBatch>
__global__ void __launch_bounds__(kThreads) walk(const __grid_constant__ Streams streams, int64_t words) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < words;
       i += kBatch * stride) {
    uint4 key[kBatch], loaded[kBatch][1 + kStates];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (i + b * stride >= words) break;
      key[b] = streams.grad[i + b * stride];
#pragma unroll
      for (int k = 0; k <= kStates; ++k) loaded[b][k] = streams.written[k][i + b * stride];
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (i + b * stride >= words) break;
#pragma unroll
      for (int k = 0; k <= kStates; ++k) {
        const uint4 x = loaded[b][k], y = key[b];
        streams.written[k][i + b * stride] = {x.x ^ y.x, x.y ^ y.y, x.z ^ y.z, x.w ^ y.w};
      }
    }
  }
}

template <int kStates>
void launch(int batch, int blocks, const Streams& streams, int64_t words, cudaStream_t stream) {
  if (batch == 1) walk<kStates, 1><<<blocks, kThreads, 0, stream>>>(streams, words);
  if (batch == 2) walk<kStates, 2><<<blocks, kThreads, 0, stream>>>(streams, words);
  if (batch == 4) walk<kStates, 4><<<blocks, kThreads, 0, stream>>>(streams, words);
}

using Launch = void (*)(int batch, int blocks, const Streams& streams, int64_t words, cudaStream_t stream);
constexpr Launch kLaunches[1 + kMaxStates] = {launch<0>, launch<1>, launch<2>, launch<3>, launch<4>};

}  // namespace

// One walk over `words` words of 16 bytes in each of 2 + `states` streams: the gradient, then what is
// written. `batch` is 1, 2 or 4. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int fusedstep_cuda_limit_run(int states, int batch,
                                                                               int blocks, void* const* data,
                                                                               int64_t words, void* stream) {
  if (states < 0 || states > kMaxStates) return cudaErrorInvalidValue;
  Streams streams{};
  streams.grad = static_cast<const uint4*>(data[0]);
  for (int k = 0; k <= states; ++k) streams.written[k] = static_cast<uint4*>(data[1 + k]);
  kLaunches[states](batch, blocks, streams, words, static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}
