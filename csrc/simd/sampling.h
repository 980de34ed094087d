// The kernels of sampling, compiled for one instruction set. Each sampling_*.cpp includes this file once,
// after it has chosen its instruction set and defined KHOT_ISA and KHOT_VECTOR_BYTES.
#pragma once

#include "kernels.h"
#include "sampling/calibrate.h"
#include "sampling/draws.h"
#include "sampling/few.h"
#include "sampling/halving.h"
#include "sampling/order.h"
#include "sampling/philox.h"
#include "sampling/poisson_binomial.h"

namespace khot::KHOT_ISA {

constexpr SamplingKernels sampling_table() {
  return {uniform_row,         order_row,           pareto_rows,   tournament_row, random_tournament_row,
          trials_row,          characteristic_row,  inclusion_row, covariance_row, calibrate_rows<false>,
          order_inclusion_row, calibrate_rows<true>};
}

}  // namespace khot::KHOT_ISA
