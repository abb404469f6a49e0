#include "bindings.h"
#include "kvcached/error.h"

namespace nb = nanobind;

namespace kvcached::bindings {
namespace {

// kvcached::Error -> prism.memory.errors.<kind>(message, numbers)
void raise(const Error& error) {
  nb::object type = nb::module_::import_("prism.memory.errors").attr(error_name(error.kind()));
  nb::dict numbers;
  for (const auto& [name, value] : error.numbers()) numbers[name.c_str()] = value;
  nb::object exception = type(error.what(), numbers);
  PyErr_SetObject(type.ptr(), exception.ptr());
}

}  // namespace

void bind_errors(nb::module_&) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    }
  });
}

}  // namespace kvcached::bindings

NB_MODULE(_kvcached, m) {
  m.doc() = "Elastic device memory shared by many processes (csrc/kvcached). Use it through prism.memory.";
  nb::set_leak_warnings(false);  // pools that live until the interpreter ends are no error
  kvcached::bindings::bind_errors(m);
  kvcached::bindings::bind_device(m);
  kvcached::bindings::bind_pool(m);
  kvcached::bindings::bind_region(m);
  kvcached::bindings::bind_rows(m);
  kvcached::bindings::bind_pieces(m);
}
