// The soft count of `count` rows, which are shared among torch's threads, and its gradients.
#pragma once

#include "kernels.h"

namespace khot {

void count_rows(const CountSpec& spec, const CountRows& rows, int64_t count);
void count_rows_backward(const CountSpec& spec, const CountRows& rows, int64_t count);

}  // namespace khot
