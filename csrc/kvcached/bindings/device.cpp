#include "kvcached/device.h"

#include <algorithm>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvcached::bindings {
namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;

nb::dict owner_dict(const OwnerStats& o) {
  nb::dict d;
  d["id"] = o.id;
  d["name"] = o.name;
  d["pid"] = o.pid;
  d["floor_bytes"] = o.floor_bytes;
  d["limit_bytes"] = o.limit_bytes == kNoLimit ? nb::none() : nb::cast(o.limit_bytes);
  d["weights_bytes"] = o.held_bytes[static_cast<int>(Klass::Weights)];
  d["kv_bytes"] = o.held_bytes[static_cast<int>(Klass::Kv)];
  d["staging_bytes"] = o.held_bytes[static_cast<int>(Klass::Staging)];
  d["outside_bytes"] = o.outside_bytes;
  d["granted_bytes"] = o.held_bytes[static_cast<int>(Klass::Outside)];
  d["measured_bytes"] = o.measured_bytes;
  d["lent_bytes"] = o.held_bytes[static_cast<int>(Klass::Lent)];
  d["wanted_bytes"] = o.wanted_bytes;
  d["physical_bytes"] = o.physical_bytes;
  d["mapped_bytes"] = o.mapped_bytes;
  d["ahead_bytes"] = o.ahead_bytes;
  d["deferred_bytes"] = o.deferred_bytes;
  d["used_bytes"] = o.used_bytes;
  d["virtual_bytes"] = o.virtual_bytes;
  d["kernel_bytes"] = o.kernel_bytes < 0 ? nb::none() : nb::cast(o.kernel_bytes);
  return d;
}

nb::dict account_dict(const AccountStats& s) {
  nb::dict d;
  d["capacity_bytes"] = s.capacity_bytes;
  d["foreign_bytes"] = s.foreign_bytes;
  d["charged_bytes"] = s.charged_bytes;
  d["free_bytes"] = s.free_bytes;
  d["wanted_bytes"] = s.wanted_bytes;
  d["page_bytes"] = s.page_bytes;
  d["lend_keep_bytes"] = s.lend_keep_bytes == kLendsNothing ? nb::none() : nb::cast(s.lend_keep_bytes);
  d["recoveries"] = s.recoveries;
  d["reaped_owners"] = s.reaped_owners;
  nb::list owners;
  for (const OwnerStats& o : s.owners) owners.append(owner_dict(o));
  d["owners"] = owners;
  return d;
}

AccountStats read_stats(Device& device) {
  nb::gil_scoped_release release;
  return device.account().stats();
}

nb::tuple audit(Device& device) {
  AuditReport report;
  {
    nb::gil_scoped_release release;
    report = device.audit();
  }
  nb::list problems;
  for (const std::string& problem : report.problems) problems.append(nb::cast(problem));
  return nb::make_tuple(account_dict(report.books), report.driver.total_bytes, report.driver.free_bytes, problems);
}

// Python's lock is given up only to wait: handing it to another thread and back costs more than a change of the books.
void reserve(Owner& owner, std::int64_t bytes, const char* klass, double timeout_s, bool yielding) {
  const Klass k = klass_of(klass);
  owner.check_usable();
  if (yielding) {
    nb::gil_scoped_release release;
    return owner.account().reserve(owner.id(), bytes, k, true);
  }
  if (owner.account().reserve_at_once(owner.id(), bytes, k)) return;
  nb::gil_scoped_release release;
  owner.account().reserve_within(owner.id(), bytes, k, timeout_s);
}

void release_bytes(Owner& owner, std::int64_t bytes, const char* klass) {
  const Klass k = klass_of(klass);
  owner.check_usable();
  if (owner.account().release_at_once(owner.id(), bytes, k)) return;
  nb::gil_scoped_release release;
  owner.account().release(owner.id(), bytes, k);
}

std::int64_t wish(Owner& owner, std::int64_t least_bytes, std::int64_t most_bytes, std::int64_t since_ns) {
  owner.check_usable();
  nb::gil_scoped_release release;
  return owner.account().wish(owner.id(), least_bytes, most_bytes, since_ns);
}

void bind_owner(nb::module_& m) {
  nb::class_<Owner>(m, "CoreOwner", nb::is_weak_referenceable())
      .def_prop_ro("id", &Owner::id)
      .def_prop_ro("usable", &Owner::usable)
      .def("reserve", &reserve, "bytes"_a, "klass"_a, "timeout_s"_a, "yielding"_a = false)
      .def("wish", &wish, "least_bytes"_a, "most_bytes"_a, "since_ns"_a = 0)
      .def_prop_ro("wished_bytes", [](const Owner& o) { return o.account().wished(o.id()); })
      .def_prop_ro("owed_bytes", [](const Owner& o) { return o.account().owed_to_others(o.id()); })
      .def("release", &release_bytes, "bytes"_a, "klass"_a)
      .def("held", [](const Owner& o, const char* klass) { return o.account().held(o.id(), klass_of(klass)); }, "klass"_a)
      .def_prop_ro("held_bytes", [](const Owner& o) { return o.account().held(o.id()); })
      .def_prop_ro("floor_bytes", [](const Owner& o) { return o.account().floor(o.id()); })
      .def_prop_ro("limit_bytes",
                   [](const Owner& o) {
                     const std::int64_t limit = o.account().limit(o.id());
                     return limit == kNoLimit ? nb::none() : nb::cast(limit);
                   })
      .def_prop_ro("spare_bytes", [](Owner& o) { return o.pages().spare_bytes(); })
      .def_prop_ro("device", [](const Owner& o) { return o.driver().name(); })
      .def_prop_ro("page_bytes", [](const Owner& o) { return o.driver().granularity_bytes(); })
      .def("pressure", &Owner::pressure)
      .def("excess", [](const Owner& o) { return o.account().excess(o.id()); })
      .def("close", &Owner::close, NoGil())
      .def("die_inside_lock",
           [](Owner& o, std::int64_t bytes, bool after_total) { o.account().die_inside_lock(o.id(), bytes, after_total); },
           "bytes"_a, "after_total"_a, "For tests: kills this process while it holds the account's lock, in the middle of a change.");
}

}  // namespace

void bind_device(nb::module_& m) {
  nb::class_<Device>(m, "CoreDevice")
      .def("__init__",
           [](Device* self, const std::string& name, std::int64_t capacity, std::int64_t page, const std::string& directory,
              const std::string& library) { new (self) Device(name, DeviceOptions{capacity, page, directory, library}); },
           "name"_a, "capacity_bytes"_a, "page_bytes"_a, "account_dir"_a, "cuda_library"_a)
      .def("enter", &Device::enter, "name"_a, "floor_bytes"_a, "limit_bytes"_a, NoGil())
      .def("stats", [](Device& d) { return account_dict(read_stats(d)); })
      .def("audit", &audit)
      .def("reap", [](Device& d) { return d.account().reap(); }, NoGil())
      .def("free_bytes", [](Device& d) { return std::max<std::int64_t>(0, d.account().free_bytes()) + d.account().lent_bytes(); })
      .def("foreign_bytes", [](Device& d) { return d.account().foreign_bytes(); })
      .def("outside_bytes", [](Device& d) { return d.account().outside_bytes(); })
      .def("note_outside", [](Device& d, OwnerId o, std::int64_t bytes) { d.account().note_outside(o, bytes); }, NoGil())
      .def("note_foreign", [](Device& d, std::int64_t bytes) { d.account().note_foreign(bytes); }, NoGil())
      .def("wanted_bytes", [](Device& d) { return d.account().wanted_bytes(); })
      .def("set_limit", [](Device& d, OwnerId o, std::int64_t bytes) { d.account().set_limit(o, bytes); }, NoGil())
      .def("offer", [](Device& d, std::int64_t keep_bytes) { d.account().offer(keep_bytes); }, "keep_bytes"_a, NoGil())
      .def("offered_bytes", [](Device& d) { return d.account().offered_bytes(); })
      .def_prop_ro("capacity_bytes", [](Device& d) { return d.account().capacity_bytes(); })
      .def_prop_ro("page_bytes", [](Device& d) { return d.account().page_bytes(); })
      .def_prop_ro("account_path", &Device::account_path);
  m.attr("NO_LIMIT") = kNoLimit;
  m.attr("LENDS_NOTHING") = kLendsNothing;
  bind_owner(m);
}

}  // namespace kvcached::bindings
