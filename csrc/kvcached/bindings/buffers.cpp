#include <nanobind/ndarray.h>

#include <cstring>

#include "bindings.h"
#include "kvcached/error.h"

namespace nb = nanobind;

namespace kvcached::bindings {
namespace {

// Looked up once; the module keeps them for the life of the interpreter.
struct Numpy {
  PyObject* empty;
  PyObject* ascontiguousarray;
  PyObject* int64;
};

const Numpy& numpy() {
  static const Numpy found = [] {
    nb::module_ module = nb::module_::import_("numpy");
    nb::object int64 = module.attr("dtype")("int64");
    return Numpy{nb::object(module.attr("empty")).release().ptr(), nb::object(module.attr("ascontiguousarray")).release().ptr(),
                 int64.release().ptr()};
  }();
  return found;
}

nb::object call2(PyObject* function, PyObject* first, PyObject* second) {
  PyObject* arguments[] = {first, second};
  PyObject* result = PyObject_Vectorcall(function, arguments, 2, nullptr);
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

bool is_int64(const Py_buffer& view) {
  const char* format = view.format;
  if (format != nullptr && (*format == '@' || *format == '=' || *format == '<')) ++format;
  return view.itemsize == 8 && format != nullptr && (std::strcmp(format, "l") == 0 || std::strcmp(format, "q") == 0);
}

}  // namespace

nb::object empty_slots(std::int64_t count) {
  nb::object number = nb::steal(PyLong_FromLongLong(count));
  return call2(numpy().empty, number.ptr(), numpy().int64);
}

SlotBuffer::SlotBuffer(nb::handle object, bool writable) {
  nb::object source = nb::borrow(object);
  if (!PyObject_CheckBuffer(source.ptr())) {
    if (nb::hasattr(source, "numpy")) {
      source = source.attr("numpy")();  // torch: shares memory; raises for tensors of a GPU
    } else if (!writable) {
      source = call2(numpy().ascontiguousarray, source.ptr(), numpy().int64);
    }
  }
  const int flags = PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(source.ptr(), &view_, flags) != 0) throw nb::python_error();
  if (!is_int64(view_) || view_.ndim > 1) {
    const std::int64_t item = view_.itemsize, dimensions = view_.ndim;
    PyBuffer_Release(&view_);
    throw Error(ErrorKind::BadRequest, "slots must be a one-dimensional int64 array", {{"item_bytes", item}, {"dimensions", dimensions}});
  }
  keep_ = std::move(source);
}

nb::object bytes_of(std::uintptr_t address, std::int64_t bytes, int dlpack_type, int dlpack_id, nb::handle owner) {
  const std::size_t shape[1] = {static_cast<std::size_t>(bytes)};
  return nb::cast(nb::ndarray<nb::array_api, std::uint8_t>(reinterpret_cast<void*>(address), 1, shape, owner, nullptr, nb::dtype<std::uint8_t>(),
                                            dlpack_type, dlpack_id));
}

Klass klass_of(const char* name) {
  if (std::strcmp(name, "weights") == 0) return Klass::Weights;
  if (std::strcmp(name, "kv") == 0) return Klass::Kv;
  if (std::strcmp(name, "staging") == 0) return Klass::Staging;
  if (std::strcmp(name, "outside") == 0) return Klass::Outside;
  if (std::strcmp(name, "lent") == 0) return Klass::Lent;
  throw Error(ErrorKind::BadRequest, std::string("class ") + name + ": choices are weights, kv, staging, outside, lent");
}

}  // namespace kvcached::bindings
