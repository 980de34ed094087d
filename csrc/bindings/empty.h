// New tensors for results.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace khot {

using Sizes = std::vector<int64_t>;

// A contiguous tensor on the device of `like` and, unless a dtype is given, of its dtype. Its entries are not
// initialised. torch::stable::new_empty does the same, but it looks the operator up by its name in each call,
// which takes longer than the kernel for a small tensor.
inline torch::stable::Tensor empty(const torch::stable::Tensor& like, const Sizes& sizes,
                                   std::optional<torch::headeronly::ScalarType> dtype = std::nullopt) {
  const int64_t dims = static_cast<int64_t>(sizes.size());
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (int64_t i = dims; i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  int32_t device_type, device_index;
  STD_TORCH_CHECK(aoti_torch_get_device_type(like.get(), &device_type) == 0 &&
                      aoti_torch_get_device_index(like.get(), &device_index) == 0,
                  "khot: a tensor without a device");
  const auto type =
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype ? *dtype : like.scalar_type()));
  AtenTensorHandle handle;
  STD_TORCH_CHECK(aoti_torch_empty_strided(dims, sizes.data(), strides.data(), type, device_type,
                                           device_index, &handle) == 0,
                  "khot: the result could not be allocated");
  return torch::stable::Tensor(handle);
}

}  // namespace khot
