// Every kernel, compiled for one instruction set. Each isa_*.cpp includes this file once, after it has chosen
// its instruction set and defined KHOT_ISA and KHOT_VECTOR_BYTES.
#pragma once

#include "assign/pass.h"
#include "budget/backward.h"
#include "budget/forward.h"
#include "counting/count.h"
#include "kernels.h"
#include "sampling/calibrate.h"
#include "sampling/draws.h"
#include "sampling/philox.h"
#include "sampling/poisson_binomial.h"
#include "selection/magnitude.h"
#include "selection/mask.h"
#include "selection/order_statistics.h"
#include "soft_topk/backward.h"
#include "soft_topk/choose.h"

namespace khot::KHOT_ISA {

constexpr Kernels table(const char* name) {
  return {name,
          forward,
          backward,
          budget,
          budget_backward,
          soft_count,
          soft_count_backward,
          assign_rows,
          topk_mask,
          order_statistics,
          magnitude,
          magnitude_backward,
          uniform_row,
          order_row,
          pareto_row,
          tournament_row,
          characteristic_row,
          inclusion_row,
          covariance_row,
          calibrate_row};
}

}  // namespace khot::KHOT_ISA
