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
  TORCH_CHECK_TYPE(PyDict_Check(args[1]), "khot: serve takes an address and a dict");
  for (const Named<Cdf>& one : kCdfs) {
    PyObject* found = PyDict_GetItemString(args[1], one.name);
    TORCH_CHECK_TYPE(found == nullptr || PyType_Check(found), "khot: ", one.name, " is not a class");
    Py_XINCREF(found);
    class_of[static_cast<int>(one.choice)] = reinterpret_cast<PyTypeObject*>(found);
  }
  served = static_cast<const Served*>(PyLong_AsVoidPtr(args[0]));
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

// A call with so many arguments, in which errors of C++ become those of Python.
template <auto call, Py_ssize_t expected>
PyObject* guarded(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == expected, "khot: expected ", expected, " arguments, but got ", count);
  return call(args);
  END_HANDLE_TH_ERRORS
}

template <auto call, Py_ssize_t expected>
PyMethodDef method(const char* name) {
  const auto address = reinterpret_cast<void (*)()>(guarded<call, expected>);
  return {name, reinterpret_cast<PyCFunction>(address), METH_FASTCALL, nullptr};
}

// One of the operators that are plain on a GPU alone, or None.
template <gpu::Operator which>
PyObject* on_gpu(PyObject* const* args) {
  if (PyObject* const found = gpu::call(which, args)) return found;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {method<serve, 2>("serve"),
                         method<soft_topk, 10>("soft_topk"),
                         method<hard_topk, 10>("hard_topk"),
                         method<soft_count, 5>("soft_count"),
                         method<inverse_soft_count, 5>("inverse_soft_count"),
                         method<topk, 5>("topk"),
                         method<topk_mask, 6>("topk_mask"),
                         method<on_gpu<gpu::kSoftRank>, 8>("soft_rank"),
                         method<on_gpu<gpu::kSoftSort>, 8>("soft_sort"),
                         method<pareto, 4>("pareto"),
                         method<soft_topk_magnitude, 8>("soft_topk_magnitude"),
                         method<on_gpu<gpu::kBudget>, 12>("soft_budget"),
                         method<on_gpu<gpu::kSelectable>, 3>("selectable"),
                         method<soft_topk_of_selectable, 9>("soft_topk_of_selectable"),
                         method<sample_khot, 11>("sample_khot"),
                         method<gated, 4>("gated"),
                         method<use_driver, 8>("use_driver"),
                         method<remember, 6>("remember"),
                         method<start, 3>("start"),
                         method<forget, 0>("forget"),
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_eager", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace khot

// The name carries torch's version (setup.py).
#define KHOT_INIT(name) PyInit_##name
#define KHOT_INIT_OF(name) KHOT_INIT(name)
PyMODINIT_FUNC KHOT_INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&khot::definition); }
