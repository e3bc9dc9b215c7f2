#include "src/ops/negative_bit.h"

#include <bit>
#include <exception>
#include <utility>
#include <vector>

#include "src/ops/native_plan.h"

namespace fusedstep::ops {
namespace {

// The words behind the sizes and strides that are looked at: what a tensor has there is shorter.
constexpr ptrdiff_t kMostWords = 24;

Tensor plain(int64_t dims, int32_t dtype) {
  const std::vector<int64_t> ones(dims, 1);
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, ones.data(), ones.data(), dtype,
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

const int64_t* sizes_of(const Tensor& tensor) {
  int64_t* sizes = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
  return sizes;
}

uint64_t word_of(const Tensor& tensor, ptrdiff_t word) {
  uint64_t found = 0;
  std::memcpy(&found, sizes_of(tensor) + word, sizeof(found));
  return found;
}

}  // namespace

NegativeBit NegativeBit::find() {
  NegativeBit found;
  try {
    std::vector<std::pair<Tensor, Tensor>> pairs;
    for (const int32_t dtype : {aoti_torch_dtype_float32(), aoti_torch_dtype_float64(),
                                aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float16()}) {
      for (int64_t dims = 0; dims <= kMostInside; ++dims) {
        const Tensor tensor = plain(dims, dtype);
        pairs.emplace_back(tensor, call("aten::_neg_view", "", tensor));
      }
    }
    // The first word that differs is the last that is read, so that nothing behind the tensor is.
    for (ptrdiff_t word = 2 * kMostInside; word < kMostWords && found.mask_ == 0; ++word) {
      uint64_t differ = 0;
      for (const auto& [tensor, negated] : pairs) differ |= word_of(tensor, word) ^ word_of(negated, word);
      found.word_ = word;
      found.mask_ = differ;
    }
    for (const auto& [tensor, negated] : pairs) {
      const bool tells = (word_of(tensor, found.word_) & found.mask_) == 0 &&
                         (word_of(negated, found.word_) & found.mask_) == found.mask_;
      if (!tells || !std::has_single_bit(found.mask_)) return {};
    }
  } catch (const std::exception&) {
    return {};
  }
  return found;
}

const NegativeBit negative_bit = NegativeBit::find();

}  // namespace fusedstep::ops
