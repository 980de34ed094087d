// A string among the arguments of an operator.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/shim_utils.h>

#include <string>

namespace khot {

// torch converts to std::string by way of a second copy that it never frees (2.10 to 2.13): 48 bytes for each
// string of each call, which also keep the heap around them from being used again.
struct Text : std::string {
  using std::string::string;
};

}  // namespace khot

template <>
struct torch::stable::detail::ToImpl<khot::Text> {
  static khot::Text call(StableIValue value, uint64_t, bool) {
    const auto handle = torch::stable::detail::to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    khot::Text text(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};
