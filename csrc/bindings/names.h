// The choices that operators are asked for by name.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <string>

#include "kernels.h"

namespace khot {

// A string among the arguments of an operator. torch converts to std::string by way of a second copy that it
// never frees (2.10 to 2.13): 48 bytes for each string of each call, which also keep the heap around them
// from being used again.
struct Text : std::string {
  using std::string::string;
};

template <class Choice, size_t count>
Choice find(const char* what, const std::string& name, const Named<Choice> (&known)[count]) {
  for (const Named<Choice>& one : known) {
    if (name == one.name) return one.choice;
  }
  std::string names;
  for (const Named<Choice>& one : known) names += (names.empty() ? "" : ", ") + std::string(one.name);
  STD_TORCH_CHECK(false, "khot: unknown ", what, " '", name, "': the CPU kernels know ", names);
}

// `shape` is the parameter of a CDF that has one.
inline Spec spec_of(const std::string& cdf, double shape, int64_t n, Output output = Output::kValue) {
  return {find("cdf", cdf, kCdfs), shape, output, n, nullptr};
}

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
