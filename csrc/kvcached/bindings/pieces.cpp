#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <string>

#include "bindings.h"
#include "kvcached/error.h"
#include "kvcached/piece_index.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvcached::bindings {
namespace {

constexpr int kCpu = 1;  // DLPack's kDLCPU
constexpr int kSpace = 32, kKey = 32;
constexpr const char* kDigits = "0123456789abcdef";

int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  throw nb::value_error("not the name of a piece: SPACE/POSITION-KEY, hexadecimal");
}

void bytes_from(const char* text, std::uint8_t* bytes, int count) {
  for (int i = 0; i < count; ++i) bytes[i] = static_cast<std::uint8_t>(digit(text[2 * i]) << 4 | digit(text[2 * i + 1]));
}

// "SPACE/POSITION-KEY": 32 digits, 6 or more, 32.
PieceName name_of(nb::str text) {
  Py_ssize_t length = 0;
  const char* const at = PyUnicode_AsUTF8AndSize(text.ptr(), &length);
  if (at == nullptr) throw nb::python_error();
  const Py_ssize_t key = length - kKey;
  if (key < kSpace + 3 || key > kSpace + 10 || at[kSpace] != '/' || at[key - 1] != '-') digit('/');
  PieceName name{};
  bytes_from(at, name.space, kSpace / 2);
  for (const char* c = at + kSpace + 1; c < at + key - 1; ++c) {
    name.position = name.position << 4 | static_cast<std::uint32_t>(digit(*c));
  }
  bytes_from(at + key, name.key, kKey / 2);
  return name;
}

void add_hex(std::string& text, const std::uint8_t* bytes, int count) {
  for (int i = 0; i < count; ++i) text += {kDigits[bytes[i] >> 4], kDigits[bytes[i] & 15]};
}

nb::tuple as_tuple(const PieceFacts& piece) {
  std::string name;
  add_hex(name, piece.name.space, kSpace / 2);
  name += '/';
  char position[12];
  std::snprintf(position, sizeof position, "%06x", piece.name.position);
  name += position;
  name += '-';
  add_hex(name, piece.name.key, kKey / 2);
  return nb::make_tuple(name, piece.bytes, piece.used_s, piece.name.position);
}

[[noreturn]] void raise_os_error(const Error& error) {
  for (const auto& [name, value] : error.numbers()) {
    if (name == "errno") PyErr_SetObject(PyExc_OSError, nb::make_tuple(value, error.what()).ptr());
  }
  throw nb::python_error();
}

// Without Python's lock where `slow`: memory is made or given back. Else it would take longer to have that lock again than to
// do what is asked.
template <bool slow, typename F>
auto ask(F f) {
  try {
    if constexpr (slow) {
      nb::gil_scoped_release release;
      return f();
    } else {
      return f();
    }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::SystemFailed) throw;
    raise_os_error(error);
  }
}

nb::object extent(const PieceExtent& found) {
  if (found.slot < 0) return nb::none();
  return nb::make_tuple(found.slot, found.offset, found.bytes);
}

std::shared_ptr<PieceIndex> open(const std::string& directory, std::int64_t slots, std::int64_t virtual_bytes) {
  return ask<true>([&] { return std::make_shared<PieceIndex>(directory, slots, virtual_bytes); });
}

}  // namespace

void bind_pieces(nb::module_& m) {
  using Index = PieceIndex;
  nb::class_<Index>(m, "PieceIndex", nb::is_weak_referenceable())
      .def(nb::new_(&open), "directory"_a, "slots"_a, "virtual_bytes"_a)
      .def("renew", [](Index& i) { ask<false>([&] { i.renew(); }); })
      .def("memory",
           [](nb::object self) {
             const Index& i = nb::cast<const Index&>(self);
             return bytes_of(reinterpret_cast<std::uintptr_t>(i.memory()), i.virtual_bytes(), kCpu, 0, self);
           })
      .def_prop_ro("pieces_fd", &Index::pieces_fd)
      .def_prop_ro("virtual_bytes", &Index::virtual_bytes)
      .def("has", [](Index& i, nb::str name) { return ask<false>([&] { return i.has(name_of(name)); }); })
      .def("begin",
           [](Index& i, nb::str name, std::int64_t bytes, std::int64_t bound_bytes) {
             const PieceName of = name_of(name);
             return extent(ask<true>([&] { return i.begin(of, bytes, bound_bytes); }));
           })
      .def("take_over",
           [](Index& i, nb::str old, double used_s, nb::str name, std::int64_t bytes) {
             return extent(ask<false>([&] { return i.take_over(name_of(old), used_s, name_of(name), bytes); }));
           })
      .def("commit",
           [](Index& i, std::int64_t slot, double now_s) { return ask<false>([&] { return i.commit(slot, now_s); }); })
      .def("abandon", [](Index& i, std::int64_t slot) { ask<true>([&] { i.abandon(slot); }); })
      .def("pin", [](Index& i, nb::str name) { return extent(ask<false>([&] { return i.pin(name_of(name)); })); })
      .def("unpin", [](Index& i, std::int64_t slot) { ask<false>([&] { i.unpin(slot); }); })
      .def("touch", [](Index& i, nb::str name, double now_s) { ask<false>([&] { i.touch(name_of(name), now_s); }); })
      .def(
          "drop",
          [](Index& i, nb::str name, double used_s) {
            const PieceName of = name_of(name);
            return ask<true>([&] { return i.drop(of, used_s); });
          },
          "name"_a, "used_s"_a = -1.0)
      .def("claim",
           [](Index& i, const std::string& label, std::int64_t bytes, std::int64_t bound_bytes) {
             return extent(ask<true>([&] { return i.claim(label, bytes, bound_bytes); }));
           })
      .def("claims",
           [](Index& i) {
             nb::list found;
             for (const PieceClaim& c : ask<true>([&] { return i.claims(); })) {
               found.append(nb::make_tuple(nb::bytes(c.label.data(), c.label.size()), c.bytes));
             }
             return found;
           })
      .def("books",
           [](Index& i) {
             const PieceBooks b = ask<false>([&] { return i.books(); });
             return nb::make_tuple(b.booked_bytes, b.piece_bytes, b.pieces, b.writing);
           })
      .def("pieces",
           [](Index& i) {
             nb::list found;
             for (const PieceFacts& piece : ask<true>([&] { return i.pieces(); })) found.append(as_tuple(piece));
             return found;
           })
      .def("reap", [](Index& i) { ask<true>([&] { i.reap(); }); })
      .def("end", [](Index& i) { ask<true>([&] { i.end(); }); });
  m.def("rehearse_deaths", &Index::rehearse_deaths, "die_in"_a, "refuse"_a = 0);
}

}  // namespace kvcached::bindings
