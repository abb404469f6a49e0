#include "kvcached/region.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "kvcached/huge_pages.h"
#include "kvcached/stream_copy.h"

namespace nb = nanobind;

namespace kvcached::bindings {
namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;
using PageTuple = std::tuple<int, std::int64_t, std::int64_t>;

template <typename Region>
nb::object memory(nb::object self) {
  const Region& region = nb::cast<const Region&>(self);
  const Driver& driver = region.owner()->driver();
  return bytes_of(region.address(), region.bytes(), driver.dlpack_type(), driver.dlpack_id(), self);
}

std::vector<PageTuple> export_pages(WeightRegion& region) {
  nb::gil_scoped_release release;
  std::vector<PageTuple> pages;
  for (const ExportedPage& p : region.export_pages()) pages.emplace_back(p.fd, p.offset_bytes, p.bytes);
  return pages;
}

std::shared_ptr<ImportedRegion> import_pages(std::shared_ptr<Owner> owner, const std::vector<PageTuple>& tuples) {
  std::vector<ExportedPage> pages;
  for (const auto& [fd, offset, bytes] : tuples) pages.push_back({fd, offset, bytes});
  auto region = std::make_shared<ImportedRegion>(owner, pages);
  owner->adopt(region);
  return region;
}

}  // namespace

void bind_region(nb::module_& m) {
  m.def(
      "stream_copy",
      [](std::uintptr_t destination, std::uintptr_t source, std::size_t bytes) {
        stream_copy(reinterpret_cast<std::uint8_t*>(destination), reinterpret_cast<const std::uint8_t*>(source), bytes);
      },
      nb::arg("destination_address"), nb::arg("source_address"), nb::arg("nbytes"), NoGil(),
      "Copies past the caches between two addresses of this process; the ranges must not overlap.");
  m.def(
      "make_huge",
      [](int fd, std::int64_t first, std::int64_t end) {
        first = (first + kHugePage - 1) / kHugePage * kHugePage;
        return make_huge(fd, first, end / kHugePage * kHugePage - first);
      },
      nb::arg("file"), nb::arg("first"), nb::arg("end"), NoGil(),
      "Makes whole huge pages of the kernel in bytes `first .. end` of a file in memory; False where it gives none.");
  nb::class_<WeightRegion>(m, "CoreWeightRegion", nb::is_weak_referenceable())
      .def(nb::new_([](std::shared_ptr<Owner> owner, std::int64_t bytes, std::int64_t page_bytes, bool exportable,
                       const char* klass) {
        auto region = std::make_shared<WeightRegion>(owner, bytes, page_bytes, exportable, klass_of(klass));
        owner->adopt(region);
        return region;
      }))
      .def("commit", &WeightRegion::commit, NoGil())
      .def("decommit", &WeightRegion::decommit, NoGil())
      .def("close", &WeightRegion::close, NoGil())
      .def("export_pages", &export_pages)
      .def("memory", &memory<WeightRegion>)
      .def_prop_ro("address", &WeightRegion::address)
      .def_prop_ro("bytes", &WeightRegion::bytes)
      .def_prop_ro("page_bytes", &WeightRegion::page_bytes)
      .def_prop_ro("committed_bytes", &WeightRegion::committed_bytes);
  nb::class_<ImportedRegion>(m, "CoreImportedRegion", nb::is_weak_referenceable())
      .def(nb::new_(&import_pages))
      .def("close", &ImportedRegion::close, NoGil())
      .def("memory", &memory<ImportedRegion>)
      .def_prop_ro("address", &ImportedRegion::address)
      .def_prop_ro("bytes", &ImportedRegion::bytes);
}

}  // namespace kvcached::bindings
