// Every kernel, compiled for one instruction set. Each isa_*.cpp includes this file once, after it has chosen
// its instruction set and defined KHOT_ISA, KHOT_NAME and KHOT_VECTOR_BYTES.
#pragma once

#include "assign/pass.h"
#include "budget/backward.h"
#include "budget/forward.h"
#include "counting/count.h"
#include "kernels.h"
#include "losses/fenchel_young.h"
#include "permutation/shares.h"
#include "sampling/calibrate.h"
#include "sampling/draws.h"
#include "sampling/few.h"
#include "sampling/halving.h"
#include "sampling/order.h"
#include "sampling/philox.h"
#include "sampling/poisson_binomial.h"
#include "selection/largest.h"
#include "selection/magnitude.h"
#include "selection/mask.h"
#include "selection/masked.h"
#include "selection/order_statistics.h"
#include "selection/weighted.h"
#include "soft_topk/backward.h"
#include "soft_topk/choose.h"

namespace khot::KHOT_ISA {

const Kernels& kernels() {
  static constexpr Kernels table{KHOT_NAME,
                                 forward,
                                 backward,
                                 budget,
                                 budget_backward,
                                 soft_count,
                                 soft_count_backward,
                                 fenchel_young,
                                 fenchel_young_backward,
                                 shares,
                                 assign_rows,
                                 topk_mask,
                                 masked,
                                 turn,
                                 topk,
                                 order_statistics,
                                 weighted_quantiles,
                                 magnitude,
                                 magnitude_backward,
                                 {uniform_row, order_row, pareto_rows, tournament_row, random_tournament_row,
                                  trials_row, characteristic_row, inclusion_row, covariance_row,
                                  calibrate_rows<false>, order_inclusion_row, calibrate_rows<true>}};
  return table;
}

}  // namespace khot::KHOT_ISA
