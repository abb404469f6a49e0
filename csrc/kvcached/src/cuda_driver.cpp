// CUDA virtual memory management as a Driver.
#include <unistd.h>

#include <atomic>
#include <mutex>

#include "kvcached/cuda_api.h"
#include "kvcached/driver.h"
#include "kvcached/error.h"

namespace kvcached {
namespace {

using namespace cuda;

// Shared by a driver and its fences: the functions, and whether the context is beyond recovery.
struct Library {
  Library(const Api& api, std::string device) : api(api), device(std::move(device)) {}
  const Api& api;
  std::string device;
  std::atomic<int> dead{kSuccess};

  void check_alive() const {
    const int result = dead.load(std::memory_order_relaxed);
    if (result != kSuccess) {
      throw Error(ErrorKind::DeadDriver, device + ": the driver failed for good earlier; replace this process",
                  {{"cuda_result", result}});
    }
  }

  // A program that captures a graph in any of its threads forbids most calls in all others, and such a call ends the capture.
  // None of ours goes to a stream, so this thread says that it knows what it does.
  void ignore_captures() const {
    static thread_local bool done = false;
    if (done) return;
    int mode = kCaptureRelaxed;
    done = api.ThreadExchangeStreamCaptureMode(&mode) == kSuccess;
  }

  [[noreturn]] void fail(Result result, const char* call, std::int64_t bytes) {
    const char* name = nullptr;
    if (api.GetErrorName(result, &name) != kSuccess || name == nullptr) name = "unknown result";
    const std::string text = device + ": " + call + " failed: " + name;
    const Numbers numbers{{"cuda_result", result}, {"requested_bytes", bytes}};
    if (is_fatal(result)) {
      dead.store(result, std::memory_order_relaxed);
      throw Error(ErrorKind::DeadDriver, text, numbers);
    }
    throw Error(result == kOutOfMemory ? ErrorKind::OutOfMemory : ErrorKind::DriverFailed, text, numbers);
  }

  void check(Result result, const char* call, std::int64_t bytes = 0) {
    if (result != kSuccess) fail(result, call, bytes);
  }
};

class EventFence final : public Fence {
 public:
  EventFence(std::shared_ptr<Library> library, Event event) : library_(std::move(library)), event_(event) {}
  ~EventFence() override { library_->api.EventDestroy(event_); }
  bool passed() override {
    if (passed_.load(std::memory_order_relaxed)) return true;
    library_->ignore_captures();
    const Result result = library_->api.EventQuery(event_);
    if (result == kNotReady) return false;
    library_->check(result, "cuEventQuery");
    passed_.store(true, std::memory_order_relaxed);
    return true;
  }

 private:
  std::shared_ptr<Library> library_;
  Event event_;
  std::atomic<bool> passed_{false};
};

class CudaDriver final : public Driver {
 public:
  CudaDriver(int device, const std::string& path) : index_(device) {
    lib_ = std::make_shared<Library>(load(path), "cuda:" + std::to_string(device));
    const Api& api = lib_->api;
    int count = 0;
    const Result ready = api.Init(0);
    if (ready != kSuccess || api.DeviceGetCount(&count) != kSuccess || device < 0 || device >= count) {
      throw Error(ErrorKind::DriverUnavailable, lib_->device + ": no such device",
                  {{"devices", count}, {"cuda_result", ready}});
    }
    lib_->check(api.DeviceGet(&device_, device), "cuDeviceGet");
    lib_->check(api.DevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
    try {
      std::size_t bytes = 0;
      const AllocationProp prop = properties(true);  // the coarser of the two
      lib_->check(api.MemGetAllocationGranularity(&bytes, &prop, kMinimumGranularity), "cuMemGetAllocationGranularity");
      granularity_ = static_cast<std::int64_t>(bytes);
    } catch (...) {
      api.DevicePrimaryCtxRelease(device_);
      throw;
    }
  }
  ~CudaDriver() override { lib_->api.DevicePrimaryCtxRelease(device_); }

  std::string name() const override { return lib_->device; }
  std::int64_t granularity_bytes() const override { return granularity_; }
  int dlpack_type() const override { return 2; }
  int dlpack_id() const override { return index_; }

  Address reserve(std::int64_t bytes) override {
    enter();
    DevicePtr address = 0;
    lib_->check(lib_->api.MemAddressReserve(&address, bytes, granularity_, 0, 0), "cuMemAddressReserve", bytes);
    return address;
  }
  void unreserve(Address address, std::int64_t bytes) override {
    enter();
    lib_->check(lib_->api.MemAddressFree(address, bytes), "cuMemAddressFree", bytes);
  }
  Handle create(std::int64_t bytes, bool exportable) override {
    enter();
    MemHandle handle = 0;
    const AllocationProp prop = properties(exportable);
    lib_->check(lib_->api.MemCreate(&handle, bytes, &prop, 0), "cuMemCreate", bytes);
    return handle;
  }
  void destroy(Handle handle, std::int64_t bytes) override {
    enter();
    lib_->check(lib_->api.MemRelease(handle), "cuMemRelease", bytes);
  }

  void map(Address address, const Handle* handles, std::int64_t count, std::int64_t bytes) override {
    enter();
    std::int64_t mapped = 0;
    try {
      for (; mapped < count; ++mapped) {
        lib_->check(lib_->api.MemMap(address + mapped * bytes, bytes, 0, handles[mapped], 0), "cuMemMap", bytes);
      }
      const AccessDesc access{{kLocationDevice, device_}, kReadWrite};
      lib_->check(lib_->api.MemSetAccess(address, count * bytes, &access, 1), "cuMemSetAccess", count * bytes);
    } catch (...) {
      // One by one: a call that fails here must not keep the others mapped.
      for (std::int64_t i = 0; i < mapped; ++i) lib_->api.MemUnmap(address + i * bytes, bytes);
      throw;
    }
  }
  void unmap(Address address, std::int64_t count, std::int64_t bytes) override {
    enter();
    lib_->check(lib_->api.MemUnmap(address, count * bytes), "cuMemUnmap", count * bytes);
  }

  ExportedPage export_page(Handle handle, std::int64_t bytes) override {
    enter();
    int fd = -1;
    lib_->check(lib_->api.MemExportToShareableHandle(&fd, handle, kPosixFd, 0), "cuMemExportToShareableHandle", bytes);
    return {fd, 0, bytes};
  }
  Handle import_page(const ExportedPage& page) override {
    enter();
    MemHandle handle = 0;
    void* fd = reinterpret_cast<void*>(static_cast<std::uintptr_t>(page.fd));
    lib_->check(lib_->api.MemImportFromShareableHandle(&handle, fd, kPosixFd), "cuMemImportFromShareableHandle", page.bytes);
    return handle;
  }
  void map_imported(Address address, Handle handle, std::int64_t bytes) override { map(address, &handle, 1, bytes); }
  void destroy_imported(Handle handle) override { destroy(handle, 0); }

  std::shared_ptr<Fence> record(std::uintptr_t stream) override {
    lib_->check_alive();
    const Api& api = lib_->api;
    Event event = nullptr;
    lib_->check(api.CtxPushCurrent(context_), "cuCtxPushCurrent");
    const Result made = api.EventCreate(&event, kEventDisableTiming);
    Context popped = nullptr;
    api.CtxPopCurrent(&popped);
    lib_->check(made, "cuEventCreate");
    auto fence = std::make_shared<EventFence>(lib_, event);
    lib_->check(api.EventRecord(event, reinterpret_cast<Stream>(stream)), "cuEventRecord");
    return fence;
  }

  DeviceMemory memory() override {
    enter();
    std::size_t free = 0, total = 0;
    lib_->check(lib_->api.CtxPushCurrent(context_), "cuCtxPushCurrent");
    const Result result = lib_->api.MemGetInfo(&free, &total);
    Context popped = nullptr;
    lib_->api.CtxPopCurrent(&popped);
    lib_->check(result, "cuMemGetInfo");
    return {static_cast<std::int64_t>(total), static_cast<std::int64_t>(free)};
  }

 private:
  // A thread that never used CUDA gets the device's context; one that did keeps its own: these calls name the device themselves.
  void enter() {
    lib_->check_alive();
    lib_->ignore_captures();
    static thread_local bool ready = false;
    if (ready) return;
    Context current = nullptr;
    lib_->check(lib_->api.CtxGetCurrent(&current), "cuCtxGetCurrent");
    if (current == nullptr) lib_->check(lib_->api.CtxSetCurrent(context_), "cuCtxSetCurrent");
    ready = true;
  }

  AllocationProp properties(bool exportable) const {
    AllocationProp prop{};
    prop.type = kPinned;
    prop.requested_handle_types = exportable ? kPosixFd : 0;
    prop.location = {kLocationDevice, device_};
    return prop;
  }

  std::shared_ptr<Library> lib_;
  int index_;
  Device device_ = 0;
  Context context_ = nullptr;
  std::int64_t granularity_ = 0;
};

}  // namespace

std::shared_ptr<Driver> make_cuda_driver(int device, const std::string& library) {
  return std::make_shared<CudaDriver>(device, library);
}

}  // namespace kvcached
