// Every kernel but those of sampling, compiled for one instruction set. Each isa_*.cpp includes this file
// once, after it has chosen its instruction set and defined KHOT_ISA and KHOT_VECTOR_BYTES.
#pragma once

#include "assign/pass.h"
#include "budget/backward.h"
#include "budget/forward.h"
#include "counting/count.h"
#include "kernels.h"
#include "permutation/shares.h"
#include "selection/largest.h"
#include "selection/magnitude.h"
#include "selection/mask.h"
#include "selection/order_statistics.h"
#include "soft_topk/backward.h"
#include "soft_topk/choose.h"

namespace khot::KHOT_ISA {

constexpr Kernels table(const char* name) {
  return {name,   forward,     backward,  budget, budget_backward,  soft_count, soft_count_backward,
          shares, assign_rows, topk_mask, topk,   order_statistics, magnitude,  magnitude_backward};
}

}  // namespace khot::KHOT_ISA
