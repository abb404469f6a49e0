// Shared by the files that bind kvcached to Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "kvcached/account_file.h"

namespace kvcached::bindings {

void bind_errors(nanobind::module_& m);
void bind_pool(nanobind::module_& m);
void bind_device(nanobind::module_& m);
void bind_region(nanobind::module_& m);
void bind_rows(nanobind::module_& m);
void bind_pieces(nanobind::module_& m);

Klass klass_of(const char* name);  // "weights", "kv", "staging", "outside", "lent"; BadRequest otherwise

// A one-dimensional int64 array of slots, read or written where it lies: anything with a buffer (numpy, array, memoryview),
// a torch CPU tensor, or for reading any sequence of ints (copied).
class SlotBuffer {
 public:
  SlotBuffer(nanobind::handle object, bool writable);
  ~SlotBuffer() { PyBuffer_Release(&view_); }
  SlotBuffer(const SlotBuffer&) = delete;
  SlotBuffer& operator=(const SlotBuffer&) = delete;
  std::int64_t* data() const { return static_cast<std::int64_t*>(view_.buf); }
  std::int64_t count() const { return view_.len / 8; }

 private:
  nanobind::object keep_;
  Py_buffer view_{};
};

nanobind::object empty_slots(std::int64_t count);  // numpy.empty(count, int64)

// The bytes [address, address + bytes) as an object with __dlpack__, which keeps `owner` alive.
nanobind::object bytes_of(std::uintptr_t address, std::int64_t bytes, int dlpack_type, int dlpack_id, nanobind::handle owner);

}  // namespace kvcached::bindings
