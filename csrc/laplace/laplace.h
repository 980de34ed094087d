// The kernels of the sorted Laplace count. Unlike the others they are not copied for each instruction set:
// their sweeps are recurrences, which wider vectors do not speed up.
#pragma once

#include "laplace/count.h"
#include "laplace/scan.h"
#include "laplace/thresholds.h"
