// fusedstep._bind: a step from Python, past torch's dispatcher.
//
// torch's operators take a list of 2,000 tensors apart in a millisecond, more than their update takes.
// Through DLPack's exchange table it is a tenth of that: addresses, sizes and strides are read where torch
// keeps them, and no tensor is copied, counted or wrapped. An operator with a dozen options costs more than
// a step of a small tensor; a function of C does not.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/dlpack.h>

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "src/ops/direct.h"
#include "src/ops/negative_bit.h"

namespace {

using fusedstep::DType;
using fusedstep::TensorView;
using fusedstep::ops::Rebinding;

const DLPackExchangeAPI* exchange_api = nullptr;

std::optional<DType> dtype_of(const DLDataType& type) {
  if (type.lanes != 1) return {};
  if (type.code == kDLFloat && type.bits == 32) return DType::kFloat;
  if (type.code == kDLFloat && type.bits == 64) return DType::kDouble;
  if (type.code == kDLFloat && type.bits == 16) return DType::kHalf;
  if (type.code == kDLBfloat && type.bits == 16) return DType::kBFloat16;
  return {};
}

// Returns a tensor's device; nothing if there are no kernels for such a device.
std::optional<int> device_of(const DLDevice& device) {
  if (device.device_type == kDLCPU) return fusedstep::kHost;
  if (device.device_type == kDLCUDA) return device.device_id;
  return {};
}

// An owned reference.
class Object {
 public:
  explicit Object(PyObject* object) : object_(object) {}
  Object(const Object&) = delete;
  Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object& operator=(Object&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// Names that are looked up at every step.
struct Names {
  PyObject *grad, *groups, *state, *store, *was_read, *params, *lr, *grad_scale, *found_inf, *is_neg,
      *flatten, *loading, *shard, *spec, *mesh, *placements, *dtensors;
};
Names names{};

// The classes of nearly all tensors: held for good.
PyTypeObject *tensor_type = nullptr, *parameter_type = nullptr;

bool is_plain(PyObject* object) {
  const PyTypeObject* const type = Py_TYPE(object);
  return type == tensor_type || type == parameter_type;
}

// torch's descriptor of `grad`, and the function by which it reads that of a tensor. Without one the
// attribute is looked up.
PyObject* grad_descriptor = nullptr;
descrgetfunc get_grad = nullptr;

// Notes both; false if an error is set.
bool find_grad_descriptor() {
  grad_descriptor = PyObject_GetAttr(reinterpret_cast<PyObject*>(tensor_type), names.grad);
  if (grad_descriptor == nullptr) return false;
  PyTypeObject* const type = Py_TYPE(grad_descriptor);
  // Without a setter it would give way to an object's own attribute.
  if (PyType_GetSlot(type, Py_tp_descr_set) == nullptr) return true;
  get_grad = reinterpret_cast<descrgetfunc>(PyType_GetSlot(type, Py_tp_descr_get));
  return true;
}

// Reads the gradients of parameters. To find the attribute in a class takes as long as to read it, and nearly
// all parameters have one of two classes, which are asked once.
class GradReader {
 public:
  GradReader() : is_torchs_(get_grad != nullptr && has_torchs(tensor_type) && has_torchs(parameter_type)) {}
  // Returns null if an error is set.
  Object operator()(PyObject* param) const {
    if (!is_torchs_ || !is_plain(param)) return Object(PyObject_GetAttr(param, names.grad));
    return Object(get_grad(grad_descriptor, param, reinterpret_cast<PyObject*>(Py_TYPE(param))));
  }

 private:
  static bool has_torchs(PyTypeObject* type) {
    const Object found(PyObject_GetAttr(reinterpret_cast<PyObject*>(type), names.grad));
    if (!found) PyErr_Clear();
    return found.get() == grad_descriptor;
  }

  bool is_torchs_;
};

// True if a tensor's values are what its memory holds. Makes the checks that _api/base.py and
// _step/gradients.py make before there is a plan: a wrapper's values lie elsewhere, and a tensor with the
// negative bit holds them negated.
bool holds_its_values(PyObject* object, const TensorView& tensor) {
  if (!is_plain(object) && PyObject_HasAttr(object, names.flatten) != 0) return false;
  if (tensor.data == nullptr && std::ranges::find(tensor.sizes, 0) == tensor.sizes.end()) return false;
  const std::optional<bool> negated = fusedstep::ops::negative_bit.of(tensor.sizes, tensor.strides);
  if (negated) return !*negated;
  return Object(PyObject_CallMethodObjArgs(object, names.is_neg, nullptr)).get() == Py_False;
}

// Makes a view of a tensor; false if it is not dense, or if its dtype or device has no kernels. The operator
// then raises the error. Writes the fields one by one: a view that is made elsewhere and copied is read in
// vectors before its fields are in the cache, for which the processor waits.
bool view(PyObject* object, TensorView& found) {
  DLTensor tensor{};  // NOLINT(bugprone-invalid-enum-default-initialization): torch fills it in
  if (exchange_api->dltensor_from_py_object_no_sync(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  const std::optional<DType> dtype = dtype_of(tensor.dtype);
  const std::optional<int> device = device_of(tensor.device);
  if (!dtype || !device) return false;
  const auto dims = static_cast<size_t>(tensor.ndim);
  found.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  found.dtype = *dtype;
  found.sizes = {tensor.shape, dims};
  found.strides = {tensor.strides, dims};
  found.device = *device;
  return holds_its_values(object, found);
}

// Prefetch distance, in tensors.
constexpr size_t kAhead = 8;

// Asks for what will be looked at: an object of a list of `count`, and what is bound as tensor i.
void prefetch(const Rebinding& bound, size_t i, PyObject* list, Py_ssize_t at, Py_ssize_t count) {
  const Py_ssize_t ahead = at + Py_ssize_t{kAhead};
  if (ahead < count) __builtin_prefetch(PyList_GetItem(list, ahead));
  bound.prefetch(i + kAhead);
}

// True if an object is a DTensor. Only a program that has imported their module has such tensors.
bool is_dtensor(PyObject* object) {
  static PyTypeObject* dtensor_type = nullptr;
  if (dtensor_type == nullptr) {
    const Object module(PyImport_GetModule(names.dtensors));
    if (!module) return false;
    dtensor_type = reinterpret_cast<PyTypeObject*>(PyObject_GetAttrString(module.get(), "DTensor"));
  }
  return Py_TYPE(object) == dtensor_type;
}

// True if two objects have the same attribute by this name, or equal ones.
bool has_equal(PyObject* a, PyObject* b, PyObject* name) {
  const Object of_a(PyObject_GetAttr(a, name)), of_b(PyObject_GetAttr(b, name));
  return of_a && of_b && PyObject_RichCompareBool(of_a.get(), of_b.get(), Py_EQ) == 1;
}

// A weight and its gradient, or this process's parts of both.
class Pair {
 public:
  Pair(PyObject* weight, PyObject* grad) : weight_(weight), grad_(grad) {
    if (is_plain(weight) || !is_dtensor(weight)) return;
    if (!are_spread_alike(weight, grad)) {
      weight_ = grad_ = nullptr;
      return;
    }
    weight_shard_ = Object(PyObject_GetAttr(weight, names.shard));
    grad_shard_ = Object(PyObject_GetAttr(grad, names.shard));
    weight_ = weight_shard_.get();
    grad_ = grad_shard_.get();
  }

  // Makes views of both; false if the operator, or who calls it, has to look at them.
  bool views(TensorView& weight, TensorView& grad) const {
    return weight_ != nullptr && grad_ != nullptr && view(weight_, weight) && view(grad_, grad);
  }
  // The object by which one gets to the gradient's memory.
  PyObject* grad() const { return grad_; }

 private:
  static bool are_spread_alike(PyObject* weight, PyObject* grad) {
    if (!is_dtensor(grad)) return false;
    const Object spec(PyObject_GetAttr(weight, names.spec)), other(PyObject_GetAttr(grad, names.spec));
    if (!spec || !other) return false;
    return spec.get() == other.get() || (has_equal(spec.get(), other.get(), names.mesh) &&
                                         has_equal(spec.get(), other.get(), names.placements));
  }

  PyObject *weight_, *grad_;  // borrowed
  Object weight_shard_{nullptr}, grad_shard_{nullptr};
};

// Compares a weight and its gradient with what is bound; false if the operator has to look at them.
bool compare(Rebinding& bound, size_t i, PyObject* weight, PyObject* grad) {
  const Pair pair(weight, grad);
  TensorView of_weight{}, of_grad{};
  return pair.views(of_weight, of_grad) && bound.compare(i, of_weight, of_grad, pair.grad());
}

// Binds weights and gradients that are not like the last ones; false if the operator has to.
bool bind_anew(int64_t plan, PyObject* weights, PyObject* grads) {
  const Py_ssize_t count = PyList_Size(weights);
  if (count != PyList_Size(grads)) return false;
  std::vector<TensorView> of_weights, of_grads;
  std::vector<Pair> pairs;  // views are good as long as they are
  of_weights.reserve(count);
  of_grads.reserve(count);
  pairs.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Pair& pair = pairs.emplace_back(PyList_GetItem(weights, i), PyList_GetItem(grads, i));
    if (!pair.views(of_weights.emplace_back(), of_grads.emplace_back())) return false;
  }
  return fusedstep::ops::bind_plan(plan, of_weights, of_grads);
}

bool rebind(int64_t plan, PyObject* weights, PyObject* grads, bool look_at_states) {
  Rebinding bound(plan);
  const Py_ssize_t count = PyList_Size(weights);
  if (static_cast<size_t>(count) != bound.tensors() || count != PyList_Size(grads)) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    prefetch(bound, i, weights, i, count);
    if (!compare(bound, i, PyList_GetItem(weights, i), PyList_GetItem(grads, i))) return false;
  }
  return bound.finish(look_at_states);
}

// Makes an error of Python's of the exception that is being handled.
void set_error() {
  try {
    throw;
  } catch (const std::bad_alloc& error) {
    PyErr_SetString(PyExc_MemoryError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

// Does work that needs none of Python's objects, and lets others have Python meanwhile. False: an error is
// set.
template <class Work>
bool without_python(Work work) {
  std::exception_ptr error;
  PyThreadState* const unlocked = PyEval_SaveThread();
  try {
    work();
  } catch (...) {
    error = std::current_exception();
  }
  PyEval_RestoreThread(unlocked);
  if (!error) return true;
  try {
    std::rethrow_exception(error);
  } catch (...) {
    set_error();
  }
  return false;
}

// plan_bind(plan, weights, grads, look_at_states=True) -> bool: whether it was done; if not, the operator of
// that name has to. Of DTensors this process's parts are bound, where gradients are spread as their weights
// are. States need no look if nobody has had them since they were bound.
PyObject* plan_bind(PyObject* /*module*/, PyObject* arguments) {
  long long plan = 0;
  PyObject *weight_list = nullptr, *grad_list = nullptr;
  int look_at_states = 1;
  if (!PyArg_ParseTuple(arguments, "LO!O!|p", &plan, &PyList_Type, &weight_list, &PyList_Type, &grad_list,
                        &look_at_states)) {
    return nullptr;
  }
  try {
    const bool is_bound =
        rebind(plan, weight_list, grad_list, look_at_states != 0) || bind_anew(plan, weight_list, grad_list);
    PyErr_Clear();
    return PyBool_FromLong(is_bound);
  } catch (...) {
    set_error();
    return nullptr;
  }
}

// The plans of a list; nothing if an error is set.
std::optional<std::vector<int64_t>> handles(PyObject* list) {
  const Py_ssize_t count = PyList_Size(list);
  if (count < 0) return {};
  std::vector<int64_t> plans(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    plans[i] = PyLong_AsLongLong(PyList_GetItem(list, i));
    if (plans[i] == -1 && PyErr_Occurred() != nullptr) return {};
  }
  return plans;
}

// prepare(rule, plan, options, grad_factor, grads): what the operator plan_prepare does.
PyObject* prepare(PyObject* /*module*/, PyObject* arguments) {
  const char* name = nullptr;
  long long plan = 0, grads = 0;
  PyObject* options = nullptr;
  double grad_factor = 1;
  if (!PyArg_ParseTuple(arguments, "sLO!dL", &name, &plan, &PyTuple_Type, &options, &grad_factor, &grads)) {
    return nullptr;
  }
  const fusedstep::ops::Rule* const rule = fusedstep::ops::find_rule(name);
  if (rule == nullptr) {
    PyErr_Format(PyExc_RuntimeError, "there is no rule \"%s\"", name);
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
  if (!without_python([&] {
        fusedstep::ops::prepare_step(plan, *rule, {values.data(), count}, grad_factor, grads, {});
      })) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

// plans_step(plans): what the operator of that name does.
PyObject* plans_step(PyObject* /*module*/, PyObject* plan_list) {
  try {
    const auto plans = handles(plan_list);
    if (!plans || !without_python([&] { fusedstep::ops::take_steps(*plans); })) return nullptr;
  } catch (...) {
    set_error();
    return nullptr;
  }
  Py_RETURN_NONE;
}

constexpr const char* kHeldPlan = "fusedstep.plan";

void free_plan(PyObject* capsule) {
  fusedstep::ops::drop_plan(reinterpret_cast<intptr_t>(PyCapsule_GetPointer(capsule, kHeldPlan)));
}

// hold_plan(plan) -> object: frees the plan when it dies. No line of Python's code runs for that, so that no
// handler of a signal does, whose exception would get lost.
PyObject* hold_plan(PyObject* /*module*/, PyObject* plan) {
  const long long handle = PyLong_AsLongLong(plan);
  if (handle == -1 && PyErr_Occurred() != nullptr) return nullptr;
  // A number that is never 0, in the place of an address.
  return PyCapsule_New(reinterpret_cast<void*>(static_cast<intptr_t>(handle)), kHeldPlan, free_plan);
}

// plans_aliasing_grads(plans) -> list: what the operator of that name returns.
PyObject* plans_aliasing_grads(PyObject* /*module*/, PyObject* arguments) {
  PyObject* plan_list = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!", &PyList_Type, &plan_list)) return nullptr;
  std::vector<int64_t> found;
  try {
    const auto plans = handles(plan_list);
    if (!plans) return nullptr;
    found = fusedstep::ops::aliasing_grads(*plans);
  } catch (...) {
    set_error();
    return nullptr;
  }
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(found.size()));
  for (size_t i = 0; list != nullptr && i < found.size(); ++i) {
    PyObject* const number = PyLong_FromLongLong(found[i]);
    if (number == nullptr) {
      Py_CLEAR(list);
    } else {
      PyList_SetItem(list, static_cast<Py_ssize_t>(i), number);
    }
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

// True if the dictionaries that are the values of `state` have just these values, in this order.
bool has_values(PyObject* state, PyObject* values) {
  const Py_ssize_t count = PyList_Size(values);
  Py_ssize_t known = 0, at_tensor = 0;
  for (PyObject *tensor = nullptr, *of_tensor = nullptr;
       PyDict_Next(state, &at_tensor, &tensor, &of_tensor) != 0;) {
    if (PyDict_Check(of_tensor) == 0) return false;
    Py_ssize_t at_name = 0;
    for (PyObject *name = nullptr, *value = nullptr; PyDict_Next(of_tensor, &at_name, &name, &value) != 0;) {
      if (known == count || PyList_GetItem(values, known) != value) return false;
      ++known;
    }
  }
  return known == count;
}

// is_state(state, values) -> bool: has_values().
PyObject* is_state(PyObject* /*module*/, PyObject* arguments) {
  PyObject *state = nullptr, *values = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyDict_Type, &state, &PyList_Type, &values)) return nullptr;
  return PyBool_FromLong(has_values(state, values));
}

// The record of the last step, a tuple, and in it a tuple for each group. python/fusedstep/_api/repeat.py
// makes both, by these names of the fields, and says what is in them.
enum InRepeat : Py_ssize_t { kRule, kEmpty, kSilent, kValues, kParts, kBumpVersions, kRepeatFields };
constexpr std::array kRepeatNames = {"rule", "empty", "silent", "values", "parts", "bump_versions"};
static_assert(kRepeatNames.size() == kRepeatFields);
enum InPart : Py_ssize_t { kItems, kWeights, kStates, kPlan, kOptions, kUse, kPartFields };
constexpr std::array kPartNames = {"items", "weights", "states", "plan", "options", "use"};
static_assert(kPartNames.size() == kPartFields);

// True if an object has no attribute of its own by this name, or if it is None.
bool is_unset(PyObject* attributes, PyObject* name) {
  PyObject* value = PyDict_GetItemWithError(attributes, name);
  return value == nullptr ? PyErr_Occurred() == nullptr : value == Py_None;
}

// True if there are still no hooks and the like. The last step had none.
bool is_undisturbed(PyObject* empty, PyObject* silent) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(empty); ++i) {
    if (PyDict_Size(PyTuple_GetItem(empty, i)) != 0) return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(silent); ++i) {
    const Object told(PyObject_CallNoArgs(PyTuple_GetItem(silent, i)));
    if (!told || PyObject_IsTrue(told.get()) != 0) return false;
  }
  return true;
}

// A group's part of a step, as it is compared with that of the last step.
class PartOfStep {
 public:
  PartOfStep(PyObject* part, PyObject* group) : part_(part), group_(group) {}

  // True if the options are the last step's. The learning rate may differ: it is the first of the numbers.
  // False for a learning rate below 0 or NaN: the step in Python says what is wrong with the rate.
  bool same_options() {
    PyObject* items = PyTuple_GetItem(part_, kItems);
    const Py_ssize_t count = PyList_Size(items);
    Py_ssize_t known = 0, at = 0;
    for (PyObject *name = nullptr, *value = nullptr; PyDict_Next(group_, &at, &name, &value) != 0;
         known += 2) {
      if (known + 1 >= count || PyList_GetItem(items, known) != name) return false;
      if (name == names.params) params_ = value;
      if (PyList_GetItem(items, known + 1) == value) continue;
      if (name != names.lr || PyFloat_CheckExact(value) == 0 || !(PyFloat_AsDouble(value) >= 0)) return false;
      numbers()[0] = PyFloat_AsDouble(value);
      Py_INCREF(value);
      PyList_SetItem(items, known + 1, value);
    }
    return known == count && params_ != nullptr;
  }

  // Binds gradients and states; false if other parameters have a gradient now, or if the operands cannot be
  // bound as the last step's. States need no look if nobody has ever had them.
  bool bind(bool look_at_states) {
    PyObject* weights = PyTuple_GetItem(part_, kWeights);
    const Py_ssize_t count = PyList_Size(params_), with_grads = PyList_Size(weights);
    grads_.reserve(with_grads);
    if (with_grads > 0) bound_.emplace(plan());
    if (bound_ && static_cast<size_t>(with_grads) != bound_->tensors()) return false;
    const GradReader grad_of;
    Py_ssize_t i = 0;
    for (Py_ssize_t p = 0; p < count; ++p) {
      PyObject* param = PyList_GetItem(params_, p);
      if (bound_) prefetch(*bound_, static_cast<size_t>(i), params_, p, count);
      Object grad = grad_of(param);
      if (!grad) return false;
      const bool steps = i < with_grads && PyList_GetItem(weights, i) == param;
      if (steps != (grad.get() != Py_None)) return false;
      if (!steps) continue;
      if (!bound_ || !compare(*bound_, static_cast<size_t>(i), param, grad.get())) return false;
      grads_.push_back(std::move(grad));
      ++i;
    }
    return i == with_grads && (!bound_ || bound_->finish(look_at_states));
  }

  bool updates() const { return bound_.has_value(); }
  long long plan() const { return PyLong_AsLongLong(PyTuple_GetItem(part_, kPlan)); }
  bool writes_grads() const { return use() != 0; }
  void prepare(const fusedstep::ops::Rule& rule, const fusedstep::Aside& aside) const {
    fusedstep::ops::prepare_step(plan_, rule, {values_, options_}, 1, use_, aside);
  }

  // To be called before prepare(), which Python's objects are out of reach of. False: an error is set.
  bool read() {
    if (writes_grads()) {
      list_of_grads_ = new_list_of_grads();
      if (!list_of_grads_) return false;
    }
    plan_ = plan();
    use_ = use();
    values_ = numbers();
    options_ = static_cast<size_t>(PyByteArray_Size(PyTuple_GetItem(part_, kOptions))) / sizeof(double);
    return true;
  }

  // True if the record of the last step has no states, since nobody had had them then. Autograd may know of
  // them now.
  bool lacks_states() const { return PyTuple_GetItem(part_, kStates) == Py_None; }
  // Tells autograd what the step overwrites.
  bool bump_versions(PyObject* raise, bool of_states) const {
    const auto of = [&](PyObject* tensors) {
      return static_cast<bool>(Object(PyObject_CallFunctionObjArgs(raise, tensors, nullptr)));
    };
    return of(PyTuple_GetItem(part_, kWeights)) && (!writes_grads() || of(list_of_grads_.get())) &&
           (!of_states || of(PyTuple_GetItem(part_, kStates)));
  }

 private:
  Object new_list_of_grads() const {
    const auto count = static_cast<Py_ssize_t>(grads_.size());
    Object list(PyList_New(count));
    for (Py_ssize_t i = 0; list && i < count; ++i) {
      Py_INCREF(grads_[i].get());
      PyList_SetItem(list.get(), i, grads_[i].get());
    }
    return list;
  }
  long long use() const { return PyLong_AsLongLong(PyTuple_GetItem(part_, kUse)); }
  double* numbers() const {
    return reinterpret_cast<double*>(PyByteArray_AsString(PyTuple_GetItem(part_, kOptions)));
  }

  PyObject *part_, *group_, *params_ = nullptr;  // borrowed
  std::vector<Object> grads_;  // held: another thread may take them from the parameters during the step
  Object list_of_grads_{nullptr};
  std::optional<Rebinding> bound_;
  long long plan_ = 0, use_ = 0;
  const double* values_ = nullptr;
  size_t options_ = 0;
};

// repeat() without its errors: nothing if one is set.
std::optional<bool> try_repeat(PyObject* optimizer, PyObject* last) {
  const Object attributes(PyObject_GenericGetDict(optimizer, nullptr));
  if (!attributes || !is_undisturbed(PyTuple_GetItem(last, kEmpty), PyTuple_GetItem(last, kSilent)) ||
      !is_unset(attributes.get(), names.loading) || !is_unset(attributes.get(), names.grad_scale) ||
      !is_unset(attributes.get(), names.found_inf)) {
    return false;
  }
  // Borrowed by the attributes, which nothing else can reach before the last use of them.
  PyObject *state = PyDict_GetItemWithError(attributes.get(), names.state),
           *groups = PyDict_GetItemWithError(attributes.get(), names.groups),
           *store = PyDict_GetItemWithError(attributes.get(), names.store),
           *parts = PyTuple_GetItem(last, kParts);
  const Object was_read(store != nullptr ? PyObject_GetAttr(store, names.was_read) : nullptr);
  const bool accessed = was_read.get() != Py_False;
  if (state == nullptr || groups == nullptr || !was_read ||
      (accessed && !has_values(state, PyTuple_GetItem(last, kValues)))) {
    return false;
  }
  const Py_ssize_t count = PyList_Size(groups);
  if (count != PyTuple_Size(parts)) return false;
  std::vector<PartOfStep> step;
  step.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!step.emplace_back(PyTuple_GetItem(parts, i), PyList_GetItem(groups, i)).same_options()) {
      return false;
    }
  }
  if (accessed && std::ranges::any_of(step, &PartOfStep::lacks_states)) return false;
  if (!std::ranges::all_of(step, [&](PartOfStep& part) { return part.bind(accessed); })) return false;

  const fusedstep::ops::Rule* const rule =
      fusedstep::ops::find_rule(PyUnicode_AsUTF8AndSize(PyTuple_GetItem(last, kRule), nullptr));
  if (rule == nullptr) return false;
  std::vector<int64_t> plans;
  plans.reserve(count);
  bool writes_grads = false;
  for (PartOfStep& part : step) {
    if (!part.updates()) continue;
    if (!part.read()) return {};
    plans.push_back(part.plan());
    writes_grads = writes_grads || part.writes_grads();
  }
  if (plans.empty()) return true;
  if (writes_grads) fusedstep::ops::find_aliasing_grads(plans);

  // Runs once, on the thread that holds the GIL, while the other threads start on the first part: raises
  // autograd's version counters, then releases the GIL for the rest of the step. No Python code may run here,
  // not even a finalizer.
  bool bumped = true;
  PyThreadState* unlocked = nullptr;
  auto only_here = [&] {
    if (unlocked != nullptr) return;
    const int collects = PyGC_Disable();
    for (const PartOfStep& part : step) {
      bumped =
          bumped && (!part.updates() || part.bump_versions(PyTuple_GetItem(last, kBumpVersions), accessed));
    }
    if (collects != 0) PyGC_Enable();
    unlocked = PyEval_SaveThread();
  };
  const fusedstep::Aside aside = std::ref(only_here);  // which takes no memory
  std::exception_ptr error;
  try {
    for (const PartOfStep& part : step) {
      if (part.updates()) part.prepare(*rule, aside);
    }
    fusedstep::ops::take_steps(plans, aside);
  } catch (...) {
    error = std::current_exception();
  }
  if (unlocked != nullptr) PyEval_RestoreThread(unlocked);
  if (error) std::rethrow_exception(error);
  if (!bumped) return {};
  return true;
}

// repeat(optimizer, last) -> bool: a step that differs from the last one in nothing but numbers and in where
// the gradients are. False, with nothing changed, if it does or may differ.
PyObject* repeat(PyObject* /*module*/, PyObject* arguments) {
  PyObject *optimizer = nullptr, *last = nullptr;
  if (!PyArg_ParseTuple(arguments, "OO!", &optimizer, &PyTuple_Type, &last)) return nullptr;
  if (PyTuple_Size(last) != kRepeatFields) {
    PyErr_SetString(PyExc_TypeError, "the last step must be told by a Repeat");
    return nullptr;
  }
  std::optional<bool> done;
  try {
    done = try_repeat(optimizer, last);
  } catch (...) {
    set_error();
  }
  if (!done) return nullptr;
  if (!*done) PyErr_Clear();
  return PyBool_FromLong(*done);
}

PyMethodDef methods[] = {{"plan_bind", plan_bind, METH_VARARGS, nullptr},
                         {"hold_plan", hold_plan, METH_O, nullptr},
                         {"prepare", prepare, METH_VARARGS, nullptr},
                         {"plans_step", plans_step, METH_O, nullptr},
                         {"plans_aliasing_grads", plans_aliasing_grads, METH_VARARGS, nullptr},
                         {"same", same, METH_VARARGS, nullptr},
                         {"is_state", is_state, METH_VARARGS, nullptr},
                         {"repeat", repeat, METH_VARARGS, nullptr},
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

// A class, held; an exception is set if there is none.
PyTypeObject* type_named(const char* module_name, const char* name) {
  const Object module(PyImport_ImportModule(module_name));
  return module ? reinterpret_cast<PyTypeObject*>(PyObject_GetAttrString(module.get(), name)) : nullptr;
}

// Adds a tuple of names to the module; false if an error is set.
template <size_t kCount>
bool add_names(PyObject* module, const char* name, const std::array<const char*, kCount>& names_in_it) {
  const Object tuple(PyTuple_New(kCount));
  for (size_t i = 0; tuple && i < kCount; ++i) {
    PyObject* const text = PyUnicode_FromString(names_in_it[i]);
    if (text == nullptr || PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), text) != 0) return false;
  }
  return tuple && PyModule_AddObjectRef(module, name, tuple.get()) == 0;
}

}  // namespace

// NOLINTNEXTLINE(bugprone-reserved-identifier): the name that Python asks for
PyMODINIT_FUNC PyInit__bind() {
  exchange_api = exchange_table();
  if (exchange_api == nullptr) return nullptr;
  names = {.grad = PyUnicode_InternFromString("grad"),
           .groups = PyUnicode_InternFromString("_groups"),
           .state = PyUnicode_InternFromString("_state"),
           .store = PyUnicode_InternFromString("_store"),
           .was_read = PyUnicode_InternFromString("was_read"),
           .params = PyUnicode_InternFromString("params"),
           .lr = PyUnicode_InternFromString("lr"),
           .grad_scale = PyUnicode_InternFromString("grad_scale"),
           .found_inf = PyUnicode_InternFromString("found_inf"),
           .is_neg = PyUnicode_InternFromString("is_neg"),
           .flatten = PyUnicode_InternFromString("__tensor_flatten__"),
           .loading = PyUnicode_InternFromString("_loading"),
           .shard = PyUnicode_InternFromString("_local_tensor"),
           .spec = PyUnicode_InternFromString("_spec"),
           .mesh = PyUnicode_InternFromString("mesh"),
           .placements = PyUnicode_InternFromString("placements"),
           .dtensors = PyUnicode_InternFromString("torch.distributed.tensor")};
  tensor_type = type_named("torch", "Tensor");
  parameter_type = type_named("torch.nn", "Parameter");
  if (tensor_type == nullptr || parameter_type == nullptr || !find_grad_descriptor()) return nullptr;
  PyObject* const module = PyModule_Create(&definition);
  if (module != nullptr && add_names(module, "REPEAT_FIELDS", kRepeatNames) &&
      add_names(module, "PART_FIELDS", kPartNames)) {
    return module;
  }
  Py_XDECREF(module);
  return nullptr;
}
