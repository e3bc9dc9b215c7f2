// fusedstep._bind: a step from Python, past torch's dispatcher.
//
// torch's operators take a list of 2,000 tensors apart in a millisecond, more than their update takes.
// Through DLPack's exchange table it is a tenth of that: addresses, sizes and strides are read where torch
// keeps them, and no tensor is copied, counted or wrapped. An operator with a dozen options costs more than
// a step of a small tensor; a function of C does not.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/dlpack.h>

#include <array>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "src/ops/direct.h"

namespace {

using fusedstep::DType;
using fusedstep::TensorView;

const DLPackExchangeAPI* torchs_tensors = nullptr;

std::optional<DType> dtype_of(const DLDataType& type) {
  if (type.lanes != 1) return {};
  if (type.code == kDLFloat && type.bits == 32) return DType::kFloat;
  if (type.code == kDLFloat && type.bits == 64) return DType::kDouble;
  if (type.code == kDLFloat && type.bits == 16) return DType::kHalf;
  if (type.code == kDLBfloat && type.bits == 16) return DType::kBFloat16;
  return {};
}

// Where a tensor is; nothing if there are no kernels for such a device.
std::optional<int> device_of(const DLDevice& device) {
  if (device.device_type == kDLCPU) return fusedstep::kHost;
  if (device.device_type == kDLCUDA) return device.device_id;
  return {};
}

// What a list's tensors are; nothing if one of them is no dense tensor of a dtype and on a device that there
// are kernels for, which the operator has the words for.
std::optional<std::vector<TensorView>> views(PyObject* list) {
  const Py_ssize_t count = PyList_Size(list);
  std::vector<TensorView> found;
  found.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    DLTensor tensor{};  // NOLINT(bugprone-invalid-enum-default-initialization): torch fills it in
    if (torchs_tensors->dltensor_from_py_object_no_sync(PyList_GetItem(list, i), &tensor) != 0) {
      PyErr_Clear();
      return {};
    }
    const std::optional<DType> dtype = dtype_of(tensor.dtype);
    const std::optional<int> device = device_of(tensor.device);
    if (!dtype || !device) return {};
    const auto dims = static_cast<size_t>(tensor.ndim);
    char* data = static_cast<char*>(tensor.data) + tensor.byte_offset;
    found.push_back({data, *dtype, {tensor.shape, dims}, {tensor.strides, dims}, *device});
  }
  return found;
}

// plan_bind(plan, weights, grads) -> bool: whether it was done; if not, the operator of that name has to.
PyObject* plan_bind(PyObject* /*module*/, PyObject* arguments) {
  long long plan = 0;
  PyObject *weight_list = nullptr, *grad_list = nullptr;
  if (!PyArg_ParseTuple(arguments, "LO!O!", &plan, &PyList_Type, &weight_list, &PyList_Type, &grad_list)) {
    return nullptr;
  }
  try {
    const auto weights = views(weight_list), grads = weights ? views(grad_list) : std::nullopt;
    return PyBool_FromLong(grads && fusedstep::ops::bind_plan(plan, *weights, *grads));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// step(optimizer, plan, options, grad_factor, grads): a step over a plan, as its operator takes it.
PyObject* step(PyObject* /*module*/, PyObject* arguments) {
  const char* optimizer = nullptr;
  long long plan = 0, grads = 0;
  PyObject* options = nullptr;
  double grad_factor = 1;
  if (!PyArg_ParseTuple(arguments, "sLO!dL", &optimizer, &plan, &PyTuple_Type, &options, &grad_factor,
                        &grads)) {
    return nullptr;
  }
  const fusedstep::ops::StepFunction take = fusedstep::ops::find_step(optimizer);
  if (take == nullptr) {
    PyErr_Format(PyExc_RuntimeError, "there is no optimizer \"%s\"", optimizer);
    return nullptr;
  }
  std::array<double, 32> values{};
  const auto count = static_cast<size_t>(PyTuple_Size(options));
  if (count > values.size()) {
    PyErr_SetString(PyExc_RuntimeError, "there are too many options");
    return nullptr;
  }
  for (size_t i = 0; i < count; ++i) {
    values[i] = PyFloat_AsDouble(PyTuple_GetItem(options, static_cast<Py_ssize_t>(i)));
    if (values[i] == -1 && PyErr_Occurred() != nullptr) return nullptr;
  }
  std::optional<std::string> error;
  Py_BEGIN_ALLOW_THREADS;
  try {
    take(plan, {values.data(), count}, grad_factor, grads);
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  Py_END_ALLOW_THREADS;
  if (error) {
    PyErr_SetString(PyExc_RuntimeError, error->c_str());
    return nullptr;
  }
  Py_RETURN_NONE;
}

// plans_shared_grads(plans) -> list: what the operator of that name returns.
PyObject* plans_shared_grads(PyObject* /*module*/, PyObject* arguments) {
  PyObject* plan_list = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!", &PyList_Type, &plan_list)) return nullptr;
  std::vector<int64_t> plans(PyList_Size(plan_list)), found;
  for (size_t i = 0; i < plans.size(); ++i) {
    plans[i] = PyLong_AsLongLong(PyList_GetItem(plan_list, static_cast<Py_ssize_t>(i)));
    if (plans[i] == -1 && PyErr_Occurred() != nullptr) return nullptr;
  }
  try {
    found = fusedstep::ops::shared_grads(plans);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(found.size()));
  for (size_t i = 0; list != nullptr && i < found.size(); ++i) {
    PyList_SetItem(list, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(found[i]));
  }
  return list;
}

// same(a, b) -> bool: whether two lists hold the very same objects.
PyObject* same(PyObject* /*module*/, PyObject* arguments) {
  PyObject *a = nullptr, *b = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &a, &PyList_Type, &b)) return nullptr;
  const Py_ssize_t count = PyList_Size(a);
  bool all = count == PyList_Size(b);
  for (Py_ssize_t i = 0; all && i < count; ++i) all = PyList_GetItem(a, i) == PyList_GetItem(b, i);
  return PyBool_FromLong(all);
}

// is_state(state, values) -> bool: whether the dictionaries that are the values of `state` have just these
// values, in this order.
PyObject* is_state(PyObject* /*module*/, PyObject* arguments) {
  PyObject *state = nullptr, *values = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyDict_Type, &state, &PyList_Type, &values)) return nullptr;
  const Py_ssize_t count = PyList_Size(values);
  Py_ssize_t known = 0, at_tensor = 0;
  for (PyObject *tensor = nullptr, *of_tensor = nullptr;
       PyDict_Next(state, &at_tensor, &tensor, &of_tensor) != 0;) {
    if (PyDict_Check(of_tensor) == 0) Py_RETURN_FALSE;
    Py_ssize_t at_name = 0;
    for (PyObject *name = nullptr, *value = nullptr; PyDict_Next(of_tensor, &at_name, &name, &value) != 0;) {
      if (known == count || PyList_GetItem(values, known) != value) Py_RETURN_FALSE;
      ++known;
    }
  }
  return PyBool_FromLong(known == count);
}

PyMethodDef methods[] = {{"plan_bind", plan_bind, METH_VARARGS, nullptr},
                         {"step", step, METH_VARARGS, nullptr},
                         {"plans_shared_grads", plans_shared_grads, METH_VARARGS, nullptr},
                         {"same", same, METH_VARARGS, nullptr},
                         {"is_state", is_state, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_bind", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

// The table that torch.Tensor carries; an exception is set if it has none that we know.
const DLPackExchangeAPI* exchange_table() {
  PyObject* torch = PyImport_ImportModule("torch");
  PyObject* type = torch != nullptr ? PyObject_GetAttrString(torch, "Tensor") : nullptr;
  PyObject* capsule = type != nullptr ? PyObject_GetAttrString(type, "__dlpack_c_exchange_api__") : nullptr;
  const auto* table =
      capsule != nullptr
          ? static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"))
          : nullptr;
  Py_XDECREF(capsule);
  Py_XDECREF(type);
  Py_XDECREF(torch);
  if (table != nullptr && (table->header.version.major != DLPACK_MAJOR_VERSION ||
                           table->dltensor_from_py_object_no_sync == nullptr)) {
    PyErr_SetString(PyExc_ImportError, "torch has another version of DLPack's exchange table");
    return nullptr;
  }
  return table;
}

}  // namespace

// NOLINTNEXTLINE(bugprone-reserved-identifier): the name that Python asks for
PyMODINIT_FUNC PyInit__bind() {
  torchs_tensors = exchange_table();
  return torchs_tensors != nullptr ? PyModule_Create(&definition) : nullptr;
}
