// What plain calls (csrc/eager) use of this library.
#include "bindings/threads.h"

extern "C" __attribute__((visibility("default"))) const void* khot_served() {
  using namespace khot;
  static const Served served{kernels(),
                             serve<&Kernels::forward>,
                             serve<&Kernels::backward>,
                             serve<&Kernels::soft_count>,
                             serve<&Kernels::soft_count_backward>,
                             serve_whole<&Kernels::topk>};
  return &served;
}
