/* A CUDA driver on host memory: the calls that kvcached makes, with the driver's rules checked and errors injected on demand.
 *
 * Physical memory is a memfd per handle, an address range is a PROT_NONE mapping, mapping maps without access and
 * cuMemSetAccess grants it, so that touching memory too early or too late is a real fault. A broken rule is answered
 * with the driver's error code and counted in fake_violations(): product code must never break one.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600 };
enum { MOST = 65536, RANGES = 4096 };

typedef struct { int live, fd, maps, exportable; size_t bytes; int device; } Handle;
typedef struct { uintptr_t at; size_t bytes; } Range;
typedef struct { uintptr_t at; size_t bytes; int handle, access; } Mapping;
typedef struct { int recorded; long ticket; } Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Handle handles[MOST];
static Range ranges[RANGES];
static Mapping mappings[MOST];
static int n_ranges, n_mappings, initialised, violations, noop, held;
static size_t granularity = 65536, total = (size_t)1 << 30, physical, foreign;
static long calls, tickets, done_tickets, fail_at = -1;
static int fail_result, fail_forever, live_events, contexts;
static char fail_call[64], last_broken[128];
static __thread void *current;
static __thread int capture_mode; /* 0 global, 1 of the thread, 2 relaxed */
static int capturing, devices = 1, linked; /* linked: GPUs may map each other's memory */

/* ---- controls for the tests ---- */

void fake_reset(size_t granularity_bytes, size_t total_bytes) {
  pthread_mutex_lock(&lock);
  granularity = granularity_bytes;
  total = total_bytes;
  violations = noop = held = capturing = linked = 0;
  devices = 1;
  foreign = 0;
  done_tickets = tickets;
  fail_at = -1;
  fail_forever = 0;
  calls = 0;
  pthread_mutex_unlock(&lock);
}
/* The nth call from now on (0: the next) of `call`, or of any call if empty, gives `result`; `forever`: and all later ones. */
void fake_inject(const char *call, long nth, int result, int forever) {
  pthread_mutex_lock(&lock);
  snprintf(fail_call, sizeof fail_call, "%s", call);
  fail_at = nth;
  fail_result = result;
  fail_forever = forever;
  pthread_mutex_unlock(&lock);
}
/* So much is somebody else's: no handle of ours, not free. */
void fake_set_foreign(size_t bytes) { pthread_mutex_lock(&lock); foreign = bytes; pthread_mutex_unlock(&lock); }
static size_t left(void) { return total > physical + foreign ? total - physical - foreign : 0; }
long fake_calls(void) { return calls; }
int fake_violations(void) { return violations; }
const char *fake_last_broken_rule(void) { return last_broken; }
long fake_physical_bytes(void) { return (long)physical; }
int fake_mappings(void) { return n_mappings; }
int fake_ranges(void) { return n_ranges; }
int fake_events(void) { return live_events; }
int fake_contexts(void) { return contexts; }
/* While some thread captures a graph in global mode, calls of threads that are not relaxed are errors and end the capture. */
void fake_set_capturing(int on) { capturing = on; }
void fake_set_devices(int count, int joined) { devices = count; linked = joined; }
int fake_pending_injection(void) { return fail_at >= 0; }
/* While streams are held, work given to them is in flight; letting go finishes it. */
void fake_hold_streams(int on) { pthread_mutex_lock(&lock); held = on; if (!on) done_tickets = tickets; pthread_mutex_unlock(&lock); }
/* For measuring the caller's own cost: mapping calls keep no books and touch no memory. */
void fake_set_noop(int on) { noop = on; }

static int broken(const char *rule, int result) {
  violations++;
  snprintf(last_broken, sizeof last_broken, "%s", rule);
  return result;
}

static int enter(const char *call) {
  calls++;
  if (fail_at >= 0 && (fail_call[0] == 0 || strcmp(fail_call, call) == 0) && fail_at-- == 0) {
    if (fail_forever) fail_at = 0;
    return fail_result;
  }
  if (!initialised && strcmp(call, "cuInit") != 0) return broken("used before cuInit", NOT_INITIALIZED);
  if (capturing && capture_mode != 2 && (strncmp(call, "cuMem", 5) == 0 || strcmp(call, "cuEventQuery") == 0)) {
    return broken("an unsafe call while a graph is captured", 900);
  }
  return SUCCESS;
}
#define ENTER(name) \
  pthread_mutex_lock(&lock); \
  int rc = enter(name); \
  if (rc != SUCCESS) { pthread_mutex_unlock(&lock); return rc; }
#define LEAVE(result) do { int leave_ = (result); pthread_mutex_unlock(&lock); return leave_; } while (0)
#define RULE(ok, rule) if (!(ok)) LEAVE(broken(rule, INVALID_VALUE))

/* ---- devices and contexts ---- */

int cuInit(unsigned flags) { ENTER("cuInit"); RULE(flags == 0, "cuInit flags"); initialised = 1; LEAVE(SUCCESS); }
int cuDeviceGetCount(int *count) { ENTER("cuDeviceGetCount"); *count = devices; LEAVE(SUCCESS); }
int cuDeviceGet(int *device, int ordinal) { ENTER("cuDeviceGet"); RULE(ordinal >= 0 && ordinal < devices, "device ordinal"); *device = ordinal; LEAVE(SUCCESS); }
int cuDevicePrimaryCtxRetain(void **context, int device) {
  ENTER("cuDevicePrimaryCtxRetain");
  RULE(device >= 0 && device < devices, "device");
  contexts++;
  *context = &handles;
  LEAVE(SUCCESS);
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  ENTER("cuDevicePrimaryCtxRelease");
  RULE(device >= 0 && contexts > 0, "release of a context that is not retained");
  contexts--;
  LEAVE(SUCCESS);
}
int cuCtxGetCurrent(void **context) { ENTER("cuCtxGetCurrent"); *context = current; LEAVE(SUCCESS); }
int cuCtxSetCurrent(void *context) { ENTER("cuCtxSetCurrent"); current = context; LEAVE(SUCCESS); }
int cuCtxPushCurrent_v2(void *context) { ENTER("cuCtxPushCurrent"); current = context; LEAVE(SUCCESS); }
int cuCtxPopCurrent_v2(void **context) { ENTER("cuCtxPopCurrent"); *context = current; LEAVE(SUCCESS); }
int cuThreadExchangeStreamCaptureMode(int *mode) {
  ENTER("cuThreadExchangeStreamCaptureMode");
  RULE(*mode >= 0 && *mode <= 2, "capture mode");
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  LEAVE(SUCCESS);
}
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
  ENTER("cuMemGetInfo");
  *free_bytes = left();
  *total_bytes = total;
  LEAVE(SUCCESS);
}
int cuGetErrorName(int result, const char **name) {
  *name = result == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : result == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
  return SUCCESS;
}

/* ---- virtual memory ---- */

typedef struct { int type, requested; struct { int type, id; } location; void *win32; unsigned char flags[8]; } Prop;
typedef struct { struct { int type, id; } location; int flags; } Access;

int cuMemGetAllocationGranularity(size_t *bytes, const Prop *prop, int option) {
  ENTER("cuMemGetAllocationGranularity");
  RULE(prop->type == 1 && prop->location.type == 1 && prop->location.id < devices && option == 0, "granularity properties");
  *bytes = granularity;
  LEAVE(SUCCESS);
}
int cuMemAddressReserve(unsigned long long *at, size_t bytes, size_t alignment, unsigned long long fixed, unsigned long long flags) {
  ENTER("cuMemAddressReserve");
  RULE(bytes > 0 && bytes % granularity == 0, "reserved size is not a multiple of the granularity");
  RULE(flags == 0 && fixed == 0 && (alignment & (alignment - 1)) == 0, "reserve arguments");
  if (n_ranges == RANGES) LEAVE(OUT_OF_MEMORY);
  char *raw = mmap(NULL, bytes + granularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) LEAVE(OUT_OF_MEMORY);
  uintptr_t aligned = ((uintptr_t)raw + granularity - 1) / granularity * granularity;
  if (aligned > (uintptr_t)raw) munmap(raw, aligned - (uintptr_t)raw);
  munmap((void *)(aligned + bytes), (uintptr_t)raw + granularity - aligned);
  ranges[n_ranges++] = (Range){aligned, bytes};
  *at = aligned;
  LEAVE(SUCCESS);
}
int cuMemAddressFree(unsigned long long at, size_t bytes) {
  ENTER("cuMemAddressFree");
  int i = 0;
  while (i < n_ranges && !(ranges[i].at == at && ranges[i].bytes == bytes)) i++;
  RULE(i < n_ranges, "freeing a range that was not reserved like that");
  for (int m = 0; m < n_mappings; m++) RULE(mappings[m].at + mappings[m].bytes <= at || mappings[m].at >= at + bytes, "freeing a range with mappings");
  munmap((void *)(uintptr_t)at, bytes);
  ranges[i] = ranges[--n_ranges];
  LEAVE(SUCCESS);
}
int cuMemCreate(unsigned long long *handle, size_t bytes, const Prop *prop, unsigned long long flags) {
  ENTER("cuMemCreate");
  RULE(flags == 0 && prop->type == 1 && prop->location.type == 1, "create properties");
  RULE(bytes > 0 && bytes % granularity == 0, "size is not a multiple of the granularity");
  if (bytes > left()) LEAVE(OUT_OF_MEMORY);
  int i = 1;
  while (i < MOST && (handles[i].live || handles[i].maps)) i++;
  if (i == MOST) LEAVE(OUT_OF_MEMORY);
  int fd = -1;
  if (!noop) {
    fd = memfd_create("fake cuda memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, bytes) != 0) LEAVE(OUT_OF_MEMORY);
  }
  handles[i] = (Handle){1, fd, 0, prop->requested == 1, bytes, prop->location.id};
  physical += bytes;
  *handle = i;
  LEAVE(SUCCESS);
}
static void drop_if_unused(Handle *h) {
  if (h->live || h->maps) return;
  if (h->fd >= 0) close(h->fd);
  h->fd = -1;
  physical -= h->bytes;
}
int cuMemRelease(unsigned long long handle) {
  ENTER("cuMemRelease");
  RULE(handle > 0 && handle < MOST && handles[handle].live, "release of a handle that is not live");
  handles[handle].live = 0;
  drop_if_unused(&handles[handle]);
  LEAVE(SUCCESS);
}
static int reserved(uintptr_t at, size_t bytes) {
  for (int i = 0; i < n_ranges; i++) {
    if (at >= ranges[i].at && at + bytes <= ranges[i].at + ranges[i].bytes) return 1;
  }
  return 0;
}
int cuMemMap(unsigned long long at, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags) {
  ENTER("cuMemMap");
  if (noop) LEAVE(SUCCESS);
  RULE(at % granularity == 0 && bytes % granularity == 0 && bytes > 0 && offset == 0 && flags == 0, "map alignment");
  RULE(handle > 0 && handle < MOST && handles[handle].live, "map of a handle that is not live");
  RULE(handles[handle].bytes == bytes, "map of another size than the handle's");
  RULE(reserved(at, bytes), "map outside of a reservation");
  for (int m = 0; m < n_mappings; m++) RULE(mappings[m].at + mappings[m].bytes <= at || mappings[m].at >= at + bytes, "map over a mapping");
  if (n_mappings == MOST) LEAVE(OUT_OF_MEMORY);
  if (mmap((void *)(uintptr_t)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handles[handle].fd, 0) == MAP_FAILED) LEAVE(OUT_OF_MEMORY);
  mappings[n_mappings++] = (Mapping){at, bytes, (int)handle, 0};
  handles[handle].maps++;
  LEAVE(SUCCESS);
}
/* The range must be whole mappings without holes, as the driver demands of unmap and set-access. */
static int covers_whole_mappings(uintptr_t at, size_t bytes) {
  size_t covered = 0;
  for (int m = 0; m < n_mappings; m++) {
    if (mappings[m].at + mappings[m].bytes <= at || mappings[m].at >= at + bytes) continue;
    if (mappings[m].at < at || mappings[m].at + mappings[m].bytes > at + bytes) return 0;
    covered += mappings[m].bytes;
  }
  return covered == bytes;
}
int cuMemUnmap(unsigned long long at, size_t bytes) {
  ENTER("cuMemUnmap");
  if (noop) LEAVE(SUCCESS);
  RULE(bytes > 0 && covers_whole_mappings(at, bytes), "unmap of less or more than whole mappings");
  for (int m = 0; m < n_mappings;) {
    if (mappings[m].at < at || mappings[m].at >= at + bytes) { m++; continue; }
    mmap((void *)mappings[m].at, mappings[m].bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    Handle *h = &handles[mappings[m].handle];
    h->maps--;
    drop_if_unused(h);
    mappings[m] = mappings[--n_mappings];
  }
  LEAVE(SUCCESS);
}
int cuMemSetAccess(unsigned long long at, size_t bytes, const Access *access, size_t count) {
  ENTER("cuMemSetAccess");
  if (noop) LEAVE(SUCCESS);
  RULE(count == 1 && access->location.type == 1 && access->location.id < devices && access->flags == 3, "access descriptor");
  RULE(covers_whole_mappings(at, bytes), "access to what is not mapped");
  for (int m = 0; m < n_mappings; m++) {
    if (mappings[m].at < at || mappings[m].at >= at + bytes) continue;
    if (handles[mappings[m].handle].device != access->location.id && !linked) LEAVE(INVALID_DEVICE);
  }
  mprotect((void *)(uintptr_t)at, bytes, PROT_READ | PROT_WRITE);
  LEAVE(SUCCESS);
}
int cuMemExportToShareableHandle(void *out, unsigned long long handle, int type, unsigned long long flags) {
  ENTER("cuMemExportToShareableHandle");
  RULE(type == 1 && flags == 0 && handle > 0 && handle < MOST && handles[handle].live, "export");
  RULE(handles[handle].exportable, "export of a page that was not created for it");
  *(int *)out = fcntl(handles[handle].fd, F_DUPFD_CLOEXEC, 0);
  LEAVE(SUCCESS);
}
int cuMemImportFromShareableHandle(unsigned long long *handle, void *fd, int type) {
  ENTER("cuMemImportFromShareableHandle");
  struct stat info, other;
  RULE(type == 1 && fstat((int)(intptr_t)fd, &info) == 0, "import of what is no descriptor");
  int i = 1;
  while (i < MOST && (handles[i].live || handles[i].maps)) i++;
  if (i == MOST) LEAVE(OUT_OF_MEMORY);
  handles[i] = (Handle){1, fcntl((int)(intptr_t)fd, F_DUPFD_CLOEXEC, 0), 0, 0, (size_t)info.st_size, 0};
  for (int j = 1; j < MOST; j++) { /* a page stays where it is */
    if (j == i || !(handles[j].live || handles[j].maps) || fstat(handles[j].fd, &other) != 0) continue;
    if (other.st_ino == info.st_ino && other.st_dev == info.st_dev) handles[i].device = handles[j].device;
  }
  physical += handles[i].bytes; /* counted twice: the fake knows nothing of other processes */
  *handle = i;
  LEAVE(SUCCESS);
}

/* ---- events: work given to a stream is in flight while fake_hold_streams() holds it ---- */

int cuEventCreate(Event **event, unsigned flags) {
  ENTER("cuEventCreate");
  if (current == NULL) LEAVE(broken("event without a current context", INVALID_CONTEXT));
  (void)flags;
  *event = calloc(1, sizeof(Event));
  live_events++;
  LEAVE(SUCCESS);
}
int cuEventRecord(Event *event, void *stream) {
  ENTER("cuEventRecord");
  (void)stream;
  event->recorded = 1;
  event->ticket = ++tickets;
  if (!held) done_tickets = tickets;
  LEAVE(SUCCESS);
}
int cuEventQuery(Event *event) {
  ENTER("cuEventQuery");
  LEAVE(event->recorded && event->ticket > done_tickets ? NOT_READY : SUCCESS);
}
int cuEventDestroy_v2(Event *event) {
  pthread_mutex_lock(&lock);
  live_events--;
  free(event);
  LEAVE(SUCCESS);
}
