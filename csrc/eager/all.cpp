// khot._eager as one translation unit, which is what is compiled: torch's headers take far longer than what
// follows them, and the files share nearly all of these.
#include "eager/cpu_calls.cpp"
#include "eager/gpu_arguments.cpp"
#include "eager/gpu_around.cpp"
#include "eager/gpu_calls.cpp"
#include "eager/gpu_draws.cpp"
#include "eager/gpu_gradient.cpp"
#include "eager/launches.cpp"
#include "eager/module.cpp"
#include "eager/thresholds.cpp"
