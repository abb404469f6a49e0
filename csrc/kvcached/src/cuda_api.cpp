#include "kvcached/cuda_api.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

#include "kvcached/error.h"

namespace kvcached::cuda {
namespace {

template <typename Function>
void find(void* library, const std::string& path, const char* symbol, Function* out) {
  void* found = dlsym(library, symbol);
  if (found == nullptr) {
    throw Error(ErrorKind::DriverUnavailable, path + " lacks " + symbol + ": not a CUDA driver, or older than CUDA 11");
  }
  *out = reinterpret_cast<Function>(found);
}

std::unique_ptr<Api> open_library(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    throw Error(ErrorKind::DriverUnavailable, std::string("the CUDA driver cannot be opened: ") + (why ? why : path));
  }
  auto api = std::make_unique<Api>();
  find(library, path, "cuInit", &api->Init);
  find(library, path, "cuDeviceGet", &api->DeviceGet);
  find(library, path, "cuDeviceGetCount", &api->DeviceGetCount);
  find(library, path, "cuDevicePrimaryCtxRetain", &api->DevicePrimaryCtxRetain);
  find(library, path, "cuDevicePrimaryCtxRelease_v2", &api->DevicePrimaryCtxRelease);
  find(library, path, "cuCtxGetCurrent", &api->CtxGetCurrent);
  find(library, path, "cuCtxSetCurrent", &api->CtxSetCurrent);
  find(library, path, "cuCtxPushCurrent_v2", &api->CtxPushCurrent);
  find(library, path, "cuCtxPopCurrent_v2", &api->CtxPopCurrent);
  find(library, path, "cuMemGetInfo_v2", &api->MemGetInfo);
  find(library, path, "cuMemGetAllocationGranularity", &api->MemGetAllocationGranularity);
  find(library, path, "cuMemAddressReserve", &api->MemAddressReserve);
  find(library, path, "cuMemAddressFree", &api->MemAddressFree);
  find(library, path, "cuMemCreate", &api->MemCreate);
  find(library, path, "cuMemRelease", &api->MemRelease);
  find(library, path, "cuMemMap", &api->MemMap);
  find(library, path, "cuMemUnmap", &api->MemUnmap);
  find(library, path, "cuMemSetAccess", &api->MemSetAccess);
  find(library, path, "cuMemExportToShareableHandle", &api->MemExportToShareableHandle);
  find(library, path, "cuMemImportFromShareableHandle", &api->MemImportFromShareableHandle);
  find(library, path, "cuEventCreate", &api->EventCreate);
  find(library, path, "cuEventRecord", &api->EventRecord);
  find(library, path, "cuEventQuery", &api->EventQuery);
  find(library, path, "cuEventDestroy_v2", &api->EventDestroy);
  find(library, path, "cuThreadExchangeStreamCaptureMode", &api->ThreadExchangeStreamCaptureMode);
  find(library, path, "cuGetErrorName", &api->GetErrorName);
  return api;
}

}  // namespace

const Api& load(const std::string& library) {
  static std::mutex lock;
  static auto* opened = new std::map<std::string, std::unique_ptr<Api>>;  // never destroyed: drivers may outlive it
  const std::string path = library.empty() ? "libcuda.so.1" : library;
  std::lock_guard<std::mutex> guard(lock);
  auto& api = (*opened)[path];
  if (api == nullptr) api = open_library(path);
  return *api;
}

bool is_fatal(Result result) {
  switch (result) {
    case kDeinitialized:
    case 46:   // DEVICE_UNAVAILABLE
    case 214:  // ECC_UNCORRECTABLE
    case 220:  // NVLINK_UNCORRECTABLE
    case 226:  // CONTAINED
    case 700:  // ILLEGAL_ADDRESS
    case 702:  // LAUNCH_TIMEOUT
    case 709:  // CONTEXT_IS_DESTROYED
    case 710:  // ASSERT
    case 714:  // HARDWARE_STACK_ERROR
    case 715:  // ILLEGAL_INSTRUCTION
    case 716:  // MISALIGNED_ADDRESS
    case 717:  // INVALID_ADDRESS_SPACE
    case 718:  // INVALID_PC
    case 719:  // LAUNCH_FAILED
    case 721:  // TENSOR_MEMORY_LEAK
    case 805:  // MPS_CONNECTION_FAILED
    case 806:  // MPS_RPC_FAILURE
    case 807:  // MPS_SERVER_NOT_READY: after a fault it takes no new clients until the old ones are gone
    case 808:  // MPS_MAX_CLIENTS_REACHED
    case 809:  // MPS_MAX_CONNECTIONS_REACHED
    case 810:  // MPS_CLIENT_TERMINATED
    case 999:  // UNKNOWN
      return true;
    default:
      return false;
  }
}

}  // namespace kvcached::cuda
