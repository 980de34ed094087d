// khot._eager: calls of the commonest operators, in eager mode, without a line of Python.
//
// At (4, 64) the kernel takes 3 µs, the operator's call 5 and the Python around it 8; backward, in a Function
// of Python, takes 60. Here arguments are read, checked and computed with in one call, and the gradient is
// a node in C++. Whatever is not a plain call gets None, and takes the ordinary way: other types, other
// devices, transforms, modes, tangents, values out of range. That way also raises the errors.
//
// On a GPU a call is one launch or a few, of which Python makes a plan when such a call comes again
// (prepared.h).
//
// It needs torch's C++ interface, which is not stable, so it serves only the torch that it was built with
// (khot/_core/eager.py). The kernels are those of khot._C.
#include "eager/calls.h"
#include "eager/plain.h"

namespace khot {
namespace {

// serve(address, classes): what khot._C offers, 0 if it is not in use, and the class of each CDF by its name.
KHOT_CALL(serve) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2 && PyDict_Check(args[1]), "khot: serve takes an address and a dict");
  for (const Named<Cdf>& one : kCdfs) {
    PyObject* found = PyDict_GetItemString(args[1], one.name);
    TORCH_CHECK_TYPE(found == nullptr || PyType_Check(found), "khot: ", one.name, " is not a class");
    Py_XINCREF(found);
    class_of[static_cast<int>(one.choice)] = reinterpret_cast<PyTypeObject*>(found);
  }
  served = static_cast<const Served*>(PyLong_AsVoidPtr(args[0]));
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef method(const char* name, PyObject* (*call)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {method("serve", serve),
                         method("soft_topk", soft_topk),
                         method("hard_topk", hard_topk),
                         method("soft_count", soft_count),
                         method("inverse_soft_count", inverse_soft_count),
                         method("topk", topk),
                         method("topk_mask", topk_mask),
                         method("soft_rank", soft_rank),
                         method("soft_sort", soft_sort),
                         method("pareto", pareto),
                         method("soft_topk_magnitude", soft_topk_magnitude),
                         method("soft_budget", soft_budget),
                         method("selectable", selectable),
                         method("soft_topk_of_selectable", soft_topk_of_selectable),
                         method("sample_khot", sample_khot),
                         method("gated", gated),
                         method("use_driver", use_driver),
                         method("remember", remember),
                         method("start", start),
                         method("forget", forget),
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_eager", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace khot

// The name carries torch's version (setup.py).
#define KHOT_INIT(name) PyInit_##name
#define KHOT_INIT_OF(name) KHOT_INIT(name)
PyMODINIT_FUNC KHOT_INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&khot::definition); }
