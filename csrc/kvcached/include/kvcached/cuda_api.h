// The part of the CUDA driver API that kvcached calls, declared here so that no CUDA toolkit is needed to build.
// Names, values and struct layouts are those of cuda.h; the functions are looked up in libcuda at run time.
#pragma once

#include <cstddef>
#include <string>

namespace kvcached::cuda {

using Result = int;
using Device = int;
using Context = void*;
using Event = void*;
using Stream = void*;
using DevicePtr = unsigned long long;
using MemHandle = unsigned long long;

inline constexpr Result kSuccess = 0, kOutOfMemory = 2, kDeinitialized = 4, kNotReady = 600;
inline constexpr int kPinned = 1, kLocationDevice = 1, kPosixFd = 1, kReadWrite = 3, kMinimumGranularity = 0;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr int kCaptureRelaxed = 2;

struct Location {
  int type;
  int id;
};

struct AllocationProp {
  int type;
  int requested_handle_types;
  Location location;
  void* win32_metadata;
  struct {
    unsigned char compression, gpu_direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
static_assert(sizeof(AllocationProp) == 32, "CUmemAllocationProp is 32 bytes");

struct AccessDesc {
  Location location;
  int flags;
};
static_assert(sizeof(AccessDesc) == 12, "CUmemAccessDesc is 12 bytes");

struct Api {
  Result (*Init)(unsigned);
  Result (*DeviceGet)(Device*, int);
  Result (*DeviceGetCount)(int*);
  Result (*DevicePrimaryCtxRetain)(Context*, Device);
  Result (*DevicePrimaryCtxRelease)(Device);
  Result (*CtxGetCurrent)(Context*);
  Result (*CtxSetCurrent)(Context);
  Result (*CtxPushCurrent)(Context);
  Result (*CtxPopCurrent)(Context*);
  Result (*MemGetInfo)(std::size_t*, std::size_t*);
  Result (*MemGetAllocationGranularity)(std::size_t*, const AllocationProp*, int);
  Result (*MemAddressReserve)(DevicePtr*, std::size_t, std::size_t, DevicePtr, unsigned long long);
  Result (*MemAddressFree)(DevicePtr, std::size_t);
  Result (*MemCreate)(MemHandle*, std::size_t, const AllocationProp*, unsigned long long);
  Result (*MemRelease)(MemHandle);
  Result (*MemMap)(DevicePtr, std::size_t, std::size_t, MemHandle, unsigned long long);
  Result (*MemUnmap)(DevicePtr, std::size_t);
  Result (*MemSetAccess)(DevicePtr, std::size_t, const AccessDesc*, std::size_t);
  Result (*MemExportToShareableHandle)(void*, MemHandle, int, unsigned long long);
  Result (*MemImportFromShareableHandle)(MemHandle*, void*, int);
  Result (*EventCreate)(Event*, unsigned);
  Result (*EventRecord)(Event, Stream);
  Result (*EventQuery)(Event);
  Result (*EventDestroy)(Event);
  Result (*ThreadExchangeStreamCaptureMode)(int*);
  Result (*GetErrorName)(Result, const char**);
};

// Opens the library (kept open for the life of the process) and finds every function, or throws DriverUnavailable.
const Api& load(const std::string& library);

// True for results after which the context never works again.
bool is_fatal(Result result);

}  // namespace kvcached::cuda
