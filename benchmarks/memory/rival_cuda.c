/* Stands in for the CUDA driver so that PyPI's kvcached links and loads on a machine without one; see rival.py.
 * Every call succeeds and does nothing. cudaMemGetInfo takes the runtime's place when this is preloaded. */
#include <stddef.h>

#define NOTHING(name) int name(void) { return 0; }
NOTHING(cuDeviceGetAttribute)
NOTHING(cuMemAddressFree)
NOTHING(cuMemAddressReserve)
NOTHING(cuMemCreate)
NOTHING(cuMemGetAllocationGranularity)
NOTHING(cuMemMap)
NOTHING(cuMemRelease)
NOTHING(cuMemSetAccess)
NOTHING(cuMemUnmap)

int cuGetErrorString(int error, const char **text) {
  (void)error;
  *text = "no driver";
  return 0;
}

int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  *free_bytes = *total_bytes = (size_t)64 << 30;
  return 0;
}
