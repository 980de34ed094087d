// Which instruction set's kernels run: the best one that the processor has and KHOT_KERNELS allows.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace khot {

#if defined(__x86_64__)
namespace {

enum class Isa { kBaseline, kAvx2, kAvx512 };

Isa choose() {
  const char* wanted = std::getenv("KHOT_KERNELS");
  const std::string most = wanted == nullptr ? "" : wanted;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512 && most != "avx2" && most != "baseline") return Isa::kAvx512;
  if (avx2 && most != "baseline") return Isa::kAvx2;
  return Isa::kBaseline;
}

template <class Table>
const Table& chosen(const Table& (*avx512)(), const Table& (*avx2)(), const Table& (*baseline)()) {
  static const Isa isa = choose();
  return isa == Isa::kAvx512 ? avx512() : isa == Isa::kAvx2 ? avx2() : baseline();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& table = chosen(avx512::kernels, avx2::kernels, baseline::kernels);
  return table;
}

const SamplingKernels& sampling_kernels() {
  static const SamplingKernels& table =
      chosen(avx512::sampling_kernels, avx2::sampling_kernels, baseline::sampling_kernels);
  return table;
}
#else
const Kernels& kernels() { return baseline::kernels(); }
const SamplingKernels& sampling_kernels() { return baseline::sampling_kernels(); }
#endif

void unknown_cdf(Cdf cdf) {
  throw std::logic_error("khot: the CPU kernels have no case for CDF number " +
                         std::to_string(static_cast<int>(cdf)) + " of khot::Cdf");
}

}  // namespace khot

// The name of the instruction set in use, which khot._kernels.cpu shows.
extern "C" __attribute__((visibility("default"))) const char* khot_isa() { return khot::kernels().isa; }
