// Which instruction set's kernels run: the best one that the processor has and KHOT_KERNELS allows.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace khot {

#if defined(__x86_64__)
namespace {

const Kernels& choose() {
  const char* wanted = std::getenv("KHOT_KERNELS");
  const std::string most = wanted == nullptr ? "" : wanted;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512 && most != "avx2" && most != "baseline") return avx512::kernels();
  if (avx2 && most != "baseline") return avx2::kernels();
  return baseline::kernels();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& table = choose();
  return table;
}
#else
const Kernels& kernels() { return baseline::kernels(); }
#endif

void unknown_cdf(Cdf cdf) {
  throw std::logic_error("khot: the CPU kernels have no case for CDF number " +
                         std::to_string(static_cast<int>(cdf)) + " of khot::Cdf");
}

}  // namespace khot

// The name of the instruction set in use, which khot._kernels.cpu shows.
extern "C" __attribute__((visibility("default"))) const char* khot_isa() { return khot::kernels().isa; }
