// The memory driver of one device: address space and physical pages, apart from each other.
//
//   reserve()   address space, nothing behind it          create()   a physical page, no address
//   map()       page at an address, readable, writable    unmap()    the address is empty again, the page lives on
//   unreserve() address space gone                        destroy()  the page is the device's again
//
// Two drivers behave alike: CUDA's virtual memory management, and host memory (a reserved range and a memfd).
// Every call either does what it says or throws and leaves things as they were. Calls are thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvcached {

using Address = std::uintptr_t;
using Handle = std::uint64_t;

// Something in flight that may still touch pages: they are unmapped once it has passed.
class Fence {
 public:
  virtual ~Fence() = default;
  virtual bool passed() = 0;  // never blocks; once true stays true
};

// A physical page that another process can map: a descriptor (owned by the receiver) and the page's place in it.
struct ExportedPage {
  int fd;
  std::int64_t offset_bytes;
  std::int64_t bytes;
};

struct DeviceMemory {
  std::int64_t total_bytes;
  std::int64_t free_bytes;  // as the driver sees it, everybody's use included; -1 unknown
};

class Driver {
 public:
  virtual ~Driver() = default;

  virtual std::string name() const = 0;                // "cuda:0", "host:0"
  virtual std::int64_t granularity_bytes() const = 0;  // sizes and addresses are multiples of this
  virtual int dlpack_type() const = 0;                 // 1 host, 2 CUDA
  virtual int dlpack_id() const = 0;

  virtual Address reserve(std::int64_t bytes) = 0;
  virtual void unreserve(Address address, std::int64_t bytes) = 0;
  // OutOfMemory if the device is full in spite of the account. Only an exportable page can be exported; it costs more.
  virtual Handle create(std::int64_t bytes, bool exportable = false) = 0;
  // Several in one call, all or none, where that is cheaper: at most as many as most_together() says.
  virtual std::int64_t most_together() const { return 1; }
  virtual void create_together(Handle* out, std::int64_t, std::int64_t bytes, bool exportable) { *out = create(bytes, exportable); }
  virtual void destroy(Handle handle, std::int64_t bytes) = 0;

  // `count` pages of `bytes` each, one after the other from `address` on.
  virtual void map(Address address, const Handle* handles, std::int64_t count, std::int64_t bytes) = 0;
  virtual void unmap(Address address, std::int64_t count, std::int64_t bytes) = 0;

  virtual ExportedPage export_page(Handle handle, std::int64_t bytes) = 0;
  // Pages of another process live as long as someone maps them and are charged to the exporter's account entry.
  // The descriptor stays the caller's and may be closed after the call.
  virtual Handle import_page(const ExportedPage& page) = 0;
  virtual void map_imported(Address address, Handle handle, std::int64_t bytes) = 0;
  virtual void destroy_imported(Handle handle) = 0;

  virtual std::shared_ptr<Fence> record(std::uintptr_t stream) = 0;  // passed once the stream's work so far is done
  virtual DeviceMemory memory() = 0;
  virtual int memfd() const { return -1; }  // host devices: what holds the pages
  // map() and unmap() of a page take microseconds and wait for no one but the kernel. Not so where another thread's call
  // into the driver, or a stream, may hold them up.
  virtual bool is_brief() const { return false; }
};

std::shared_ptr<Driver> make_host_driver(const std::string& name, std::int64_t page_bytes);

// Opens libcuda at run time; DriverUnavailable says what is missing. `library` empty: the system's libcuda.so.1.
std::shared_ptr<Driver> make_cuda_driver(int device, const std::string& library);

}  // namespace kvcached
