// What plain calls (csrc/eager) use of this library.
#include "bindings/selection.h"
#include "bindings/soft_count.h"
#include "bindings/soft_topk.h"

extern "C" __attribute__((visibility("default"))) const void* khot_served() {
  static const khot::Served served{khot::kernels(),  khot::forward_rows,        khot::backward_rows,
                                   khot::count_rows, khot::count_rows_backward, khot::topk_rows};
  return &served;
}
