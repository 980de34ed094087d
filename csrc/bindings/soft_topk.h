// The soft top-k of `count` rows, which are shared among torch's threads, and its gradients.
#pragma once

#include "kernels.h"

namespace khot {

void forward_rows(const Spec& spec, const ForwardRows& rows, int64_t count);
void backward_rows(const Spec& spec, const BackwardRows& rows, int64_t count);

}  // namespace khot
