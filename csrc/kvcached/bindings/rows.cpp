#include "kvcached/row_copy.h"

#include <stdexcept>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvcached::bindings {
namespace {

void gather(std::uintptr_t packed, std::uintptr_t base, std::int64_t stride, std::int64_t width, nb::handle rows,
            bool streamed) {
  SlotBuffer numbers(rows, false);
  nb::gil_scoped_release release;
  gather_rows(reinterpret_cast<std::uint8_t*>(packed), reinterpret_cast<const std::uint8_t*>(base), stride, width,
              numbers.data(), numbers.count(), streamed);
}

void scatter(std::uintptr_t base, std::int64_t stride, std::int64_t width, nb::handle rows, std::uintptr_t packed) {
  SlotBuffer numbers(rows, false);
  nb::gil_scoped_release release;
  scatter_rows(reinterpret_cast<std::uint8_t*>(base), stride, width, numbers.data(), numbers.count(),
               reinterpret_cast<const std::uint8_t*>(packed));
}

void check_summed(std::int64_t count, std::int64_t width) {
  if (count * width < kXxh3Least) throw std::invalid_argument("too few bytes to be summed by this");
}

std::uint64_t gather_summed(std::uintptr_t packed, std::uintptr_t base, std::int64_t stride, std::int64_t width,
                            nb::handle rows, bool streamed) {
  SlotBuffer numbers(rows, false);
  check_summed(numbers.count(), width);
  nb::gil_scoped_release release;
  return gather_summed_rows(reinterpret_cast<std::uint8_t*>(packed), reinterpret_cast<const std::uint8_t*>(base), stride,
                            width, numbers.data(), numbers.count(), streamed);
}

std::uint64_t scatter_summed(std::uintptr_t base, std::int64_t stride, std::int64_t width, nb::handle rows,
                             std::uintptr_t packed) {
  SlotBuffer numbers(rows, false);
  check_summed(numbers.count(), width);
  nb::gil_scoped_release release;
  return scatter_summed_rows(reinterpret_cast<std::uint8_t*>(base), stride, width, numbers.data(), numbers.count(),
                             reinterpret_cast<const std::uint8_t*>(packed));
}

}  // namespace

void bind_rows(nb::module_& m) {
  m.def("gather_rows", &gather, "packed_address"_a, "base_address"_a, "stride_bytes"_a, "width_bytes"_a, "rows"_a,
        "streamed"_a = false,
        "Copies rows of host memory into packed bytes, in the order of `rows`; without Python's lock.");
  m.def("scatter_rows", &scatter, "base_address"_a, "stride_bytes"_a, "width_bytes"_a, "rows"_a, "packed_address"_a,
        "Copies packed bytes to rows of host memory; without Python's lock.");
  m.def("gather_summed_rows", &gather_summed, "packed_address"_a, "base_address"_a, "stride_bytes"_a, "width_bytes"_a,
        "rows"_a, "streamed"_a = false, "As gather_rows; returns XXH3 of the packed bytes, which are more than 240.");
  m.def("scatter_summed_rows", &scatter_summed, "base_address"_a, "stride_bytes"_a, "width_bytes"_a, "rows"_a,
        "packed_address"_a, "As scatter_rows; returns XXH3 of the packed bytes, which are more than 240.");
}

}  // namespace kvcached::bindings
