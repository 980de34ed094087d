// The k largest entries of `count` rows, which are shared among torch's threads.
#pragma once

#include "kernels.h"

namespace khot {

void topk_rows(const TopKSpec& spec, const TopKRows& rows, int64_t count);

}  // namespace khot
