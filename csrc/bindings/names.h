// The choices that operators are asked for by name.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <string>

#include "kernels.h"

namespace khot {

template <class Choice, size_t count>
Choice find(const char* what, const std::string& name, const Named<Choice> (&known)[count]) {
  for (const Named<Choice>& one : known) {
    if (name == one.name) return one.choice;
  }
  std::string names;
  for (const Named<Choice>& one : known) names += (names.empty() ? "" : ", ") + std::string(one.name);
  STD_TORCH_CHECK(false, "khot: unknown ", what, " '", name, "': the CPU kernels know ", names);
}

}  // namespace khot
