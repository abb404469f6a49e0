#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "kvcached/arena.h"
#include "kvcached/error.h"
#include "kvcached/fence.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvcached::bindings {
namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;

// What is mapped, or can be in a moment, is handed out with the interpreter lock held: handing that lock to another thread and
// back costs more, up to 5 ms where that one computes. Whatever takes long or waits goes without it.
void alloc_to(Pool& pool, std::int64_t* out, std::int64_t count, bool fresh) {
  if (pool.alloc_at_once(out, count, fresh)) return;
  nb::gil_scoped_release release;
  pool.alloc(out, count, fresh);
}

nb::object alloc(Pool& pool, std::int64_t count, bool fresh) {
  if (count < 0) throw Error(ErrorKind::BadRequest, "a count of slots must not be negative", {{"count", count}});
  nb::object slots = empty_slots(count);
  Py_buffer view;
  if (PyObject_GetBuffer(slots.ptr(), &view, PyBUF_SIMPLE | PyBUF_WRITABLE) != 0) throw nb::python_error();
  auto* out = static_cast<std::int64_t*>(view.buf);
  PyBuffer_Release(&view);  // the array is ours alone and keeps its memory
  alloc_to(pool, out, count, fresh);
  return slots;
}

nb::object alloc_after(Pool& pool, nb::handle last) {
  SlotBuffer ends(last, false);
  nb::object slots = empty_slots(ends.count());
  SlotBuffer out(slots, true);
  if (pool.alloc_after_at_once(ends.data(), out.data(), ends.count())) return slots;
  nb::gil_scoped_release release;
  pool.alloc_after(ends.data(), out.data(), ends.count());
  return slots;
}

void alloc_into(Pool& pool, nb::handle buffer, bool fresh) {
  SlotBuffer slots(buffer, true);
  alloc_to(pool, slots.data(), slots.count(), fresh);
}

bool back(Pool& pool, std::int64_t slots, bool fresh) {
  if (pool.is_backed(slots, fresh)) return true;
  nb::gil_scoped_release release;
  return pool.back(slots, fresh);
}

void reset(Pool& pool) {
  if (pool.reset()) pool.settle();
}

void free_slots(Pool& pool, nb::handle buffer) {
  SlotBuffer slots(buffer, false);
  bool due = false;
  const bool done = pool.free_at_once(slots.data(), slots.count(), &due);
  if (done && (!due || pool.settle_at_once())) return;
  nb::gil_scoped_release release;
  if (!done) due = pool.free(slots.data(), slots.count());
  if (due) pool.settle();
}

nb::dict stats(const Pool& pool) {
  const PoolStats s = pool.stats();
  nb::dict d;
  d["lease_bytes"] = s.lease_bytes;
  d["target_bytes"] = s.target_bytes;
  d["mapped_bytes"] = s.mapped_bytes;
  d["used_bytes"] = s.used_bytes;
  d["ahead_bytes"] = s.ahead_bytes;
  d["deferred_bytes"] = s.deferred_bytes;
  d["used_slots"] = s.used_slots;
  d["available_slots"] = s.available_slots;
  d["books_bytes"] = s.books_bytes;
  d["maps"] = s.maps;
  d["unmaps"] = s.unmaps;
  return d;
}

nb::list regions(const Pool& pool) {
  nb::list all;
  for (const Region& r : pool.geometry().regions) {
    all.append(nb::make_tuple(r.offset_bytes, r.row_bytes, r.block_bytes * pool.geometry().blocks));
  }
  return all;
}

using GroupTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool, std::int64_t, std::int64_t,
                              std::int64_t, std::int64_t>;

std::vector<std::shared_ptr<Pool>> divide(Arena& arena, const std::vector<GroupTuple>& tuples, double timeout_s) {
  std::vector<Group> groups;
  for (const auto& [layers, heads, k, v, dtype, layer_major, multiple, per_slot, tokens, lease] : tuples) {
    groups.push_back({{layers, heads, k, v, dtype, layer_major ? Order::LayerMajor : Order::TokenMajor, multiple, per_slot}, tokens, lease});
  }
  nb::gil_scoped_release release;
  return arena.divide(groups, timeout_s);
}

nb::object memory(nb::object self) {
  const Pool& pool = nb::cast<const Pool&>(self);
  const Driver& driver = pool.owner()->driver();
  const Geometry& g = pool.geometry();
  const std::int64_t bytes = g.regions.back().offset_bytes + g.regions.back().block_bytes * g.blocks;
  return bytes_of(pool.address(), bytes, driver.dlpack_type(), driver.dlpack_id(), self);
}

nb::object layout(const Pool& pool) {
  const KvLayout& l = pool.geometry().layout;
  nb::dict d;
  d["layers"] = l.layers;
  d["kv_heads"] = l.kv_heads;
  d["head_dim"] = l.head_dim;
  d["v_head_dim"] = l.v_head_dim;
  d["dtype_bytes"] = l.dtype_bytes;
  d["order"] = l.order == Order::LayerMajor ? "layer" : "token";
  d["page_multiple"] = l.page_multiple;
  d["tokens_per_slot"] = l.tokens_per_slot;
  return nb::module_::import_("prism.memory.layout").attr("KvLayout")(**d);
}

void bind_queries(nb::class_<Pool>& pool) {
  pool.def_prop_ro("address", &Pool::address, "Where the arena's range starts; region offsets count from here.")
      .def_prop_ro("regions", &regions, "(offset_bytes, row_bytes, bytes) of each region: one for token-major, K and V of each layer else.")
      .def_prop_ro("page_bytes", [](const Pool& p) { return p.geometry().page_bytes; })
      .def_prop_ro("block_bytes", [](const Pool& p) { return p.geometry().block_bytes; }, "Bytes by which the pool grows and shrinks.")
      .def_prop_ro("block_slots", [](const Pool& p) { return p.geometry().min_block_slots; }, "Slots that every block has at least.")
      .def_prop_ro("blocks", [](const Pool& p) { return p.geometry().blocks; })
      .def_prop_ro("max_slots", [](const Pool& p) { return p.geometry().max_slots; }, "Most slots in use at once.")
      .def_prop_ro("slot_ids", [](const Pool& p) { return p.geometry().slots; }, "Ids are below this; more than max_slots.")
      .def_prop_ro("slot_bytes", [](const Pool& p) { return p.geometry().layout.token_bytes() * p.geometry().layout.tokens_per_slot; })
      .def_prop_ro("rows", [](const Pool& p) { return p.geometry().slots * p.geometry().layout.tokens_per_slot; },
                   "Rows of each K and V view: slot s is the rows s * tokens_per_slot and following.")
      .def_prop_ro("virtual_bytes", [](const Pool& p) { return p.geometry().virtual_bytes; })
      .def_prop_ro("lease_bytes", [](const Pool& p) { return p.stats().lease_bytes; }, "Bytes held in the account.")
      .def_prop_ro("is_open", &Pool::is_open)
      .def_prop_ro("layout", &layout, "The KvLayout it was divided with.")
      .def("memory", &memory, "The bytes from `address` to the end of the last region, with __dlpack__; unmapped ones fault.")
      .def("stats", &stats, "Bytes by state and counters.")
      .def("check", &Pool::check, NoGil(), "Verifies every invariant of the books; raises BadRequest.")
      .def("available", &Pool::available, "Slots that alloc() will not refuse: covered by the lease, whatever other processes do.")
      .def("used", &Pool::used)
      .def("scattered", &Pool::scattered, "Free slots in blocks that have some in use: part of available(), but with neighbours.")
      .def("pressure", &Pool::pressure, "Bytes the owner should give back now: others wait, or its limit was lowered. Takes no lock.");
}

void bind_changes(nb::class_<Pool>& pool) {
  pool.def("alloc", &alloc, "count"_a, "fresh"_a = false,
           "`count` slots as numpy int64; never slot 0. All or nothing: OutOfMemory. `fresh`: from empty blocks, if there are any.")
      .def("alloc_after", &alloc_after, "last"_a,
           "The next slot of each sequence, given its last: in the same block if it has room, else in an empty one, else in the fullest. "
           "A last below 1, or given back meanwhile, is a sequence without a block.")
      .def("alloc_into", &alloc_into, "buffer"_a, "fresh"_a = false, "Fills an int64 array (numpy, torch CPU) with slots, as alloc() does.")
      .def("free", &free_slots, "slots"_a, "Gives slots back, all or nothing: DoubleFree, ForeignSlot.")
      .def("reset", &reset, NoGil(), "Every slot is free again, as if each had been given back.")
      .def("quiesce", &Pool::quiesce, NoGil(),
           "Does now what is due: unmaps surplus whose fences have passed, gives back lease; waits for the helper thread.")
      .def("set_lease", &Pool::set_lease, "lease_bytes"_a, NoGil(),
           "Holds this much from now on. Growing raises OutOfMemory or LimitExceeded; shrinking is a target worked down to.")
      .def("ensure", &Pool::ensure, "slots"_a, "yielding"_a = false, NoGil(), "Grows the lease until `slots` are available; False, and no change, if refused.")
      .def("back", &back, "slots"_a, "fresh"_a = false,
           "Puts pages behind the next `slots` slots of the lease. False: the device is full in spite of the account; the lease went back.")
      .def("give_back", &Pool::give_back, "keep_slots"_a = 0, "most_bytes"_a = INT64_MAX, NoGil(),
           "Shrinks the lease by what is not in use, keeping `keep_slots` available. Returns bytes given to the account by now.")
      .def("trim", &Pool::trim, NoGil(), "Gives back the whole unused lease and destroys spare pages. Returns bytes given to the account.")
      .def("set_ahead",
           [](Pool& p, std::int64_t low, std::optional<std::int64_t> high) { p.set_ahead(low, high ? *high : -1); }, "low_bytes"_a,
           "high_bytes"_a.none(), NoGil(),
           "Keeps between low and high bytes mapped with no slot in use: a helper thread refills below low; beyond high they are unmapped.")
      .def("fence_with", [](Pool& p, std::shared_ptr<ManualFence> f) { p.fence_with(std::move(f)); }, "fence"_a.none(),
           "Blocks that run empty from now on keep their pages until this fence has been signalled; None: no fence.")
      .def("defer_on_stream", &Pool::defer_on_stream, "stream"_a,
           "Blocks that run empty from now on keep their pages until what this CUDA stream was given by then is done.")
      .def("close", &Pool::close, NoGil(), "Unmaps everything and gives the lease back. Slots and views are void.");
}

}  // namespace

void bind_pool(nb::module_& m) {
  nb::class_<ManualFence>(m, "Fence", "Something in flight on a host device; signal() when it has passed.")
      .def(nb::new_([] { return std::make_shared<ManualFence>(); }))
      .def("signal", &ManualFence::signal)
      .def("passed", &ManualFence::passed);
  nb::class_<Pool> pool(m, "Pool", nb::is_weak_referenceable(), "Slots of a KV cache whose pages come and go with use.");
  bind_queries(pool);
  bind_changes(pool);
  nb::class_<Arena>(m, "CoreArena", nb::is_weak_referenceable())
      .def(nb::new_([](std::shared_ptr<Owner> owner, std::int64_t bytes) {
        auto arena = std::make_shared<Arena>(owner, bytes);
        owner->adopt(arena);
        return arena;
      }))
      .def("divide", &divide)
      .def("close", &Arena::close, NoGil())
      .def_prop_ro("address", &Arena::address)
      .def_prop_ro("virtual_bytes", &Arena::virtual_bytes);
}

}  // namespace kvcached::bindings
