#include "kvcached/device.h"

#include <sys/stat.h>
#include <time.h>

#include <cerrno>
#include <charconv>

#include "kvcached/error.h"
#include "kvcached/process.h"

namespace kvcached {
namespace {

constexpr int kAuditLooks = 20;
constexpr std::int64_t kAuditPause_ns = 2000000;

// "cuda:3" -> 3 for kind "cuda"; -1 if it is not of that kind.
int index_of(const std::string& name, const std::string& kind) {
  if (name.rfind(kind + ":", 0) != 0) return -1;
  int index = -1;
  const char* end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + kind.size() + 1, end, index);
  return error == std::errc() && rest == end && index >= 0 ? index : -1;
}

std::string mismatch(const OwnerStats& o, const char* what, std::int64_t a, std::int64_t b) {
  return "owner " + o.name + " (pid " + std::to_string(o.pid) + "): " + what + ": " + std::to_string(a) + " > " + std::to_string(b);
}

}  // namespace

Device::Device(const std::string& name, const DeviceOptions& options) : name_(name), options_(options) {
  index_of_cuda_ = index_of(name, "cuda");
  if (index_of_cuda_ < 0 && index_of(name, "host") < 0) {
    throw Error(ErrorKind::BadRequest, "device " + name + ": choices are host:N and cuda:N");
  }
  if (options.capacity_bytes < 0 || options.page_bytes <= 0) {
    throw Error(ErrorKind::BadRequest, "capacity_bytes and page_bytes must be positive",
                {{"capacity_bytes", options.capacity_bytes}, {"page_bytes", options.page_bytes}});
  }
  if (mkdir(options.account_directory.c_str(), 0700) != 0 && errno != EEXIST) {
    throw system_error("account directory " + options.account_directory, errno);
  }
  std::string file = name;
  file[file.find(':')] = '-';
  path_ = options.account_directory + "/" + file + ".account";
  account_ = std::make_shared<Account>(path_, options.capacity_bytes, options.page_bytes);
}

std::shared_ptr<Driver> Device::driver() {
  if (is_host()) return make_host_driver(name_, account_->page_bytes());
  std::lock_guard<std::mutex> guard(lock_);
  if (cuda_ == nullptr) {
    cuda_ = make_cuda_driver(index_of_cuda_, options_.cuda_library);
    cuda_fork_generation_ = fork_generation();
  }
  if (cuda_fork_generation_ != fork_generation()) {
    throw Error(ErrorKind::DriverUnavailable, name_ + ": CUDA was initialised before this process was forked and cannot be used in it");
  }
  return cuda_;
}

std::shared_ptr<Owner> Device::enter(const std::string& owner, std::int64_t floor_bytes, std::int64_t limit_bytes) {
  return std::make_shared<Owner>(driver(), account_, owner, floor_bytes, limit_bytes);
}

std::vector<std::string> disagreements(const AccountStats& books) {
  std::vector<std::string> found;
  std::int64_t charged = 0, granted = 0;
  for (const OwnerStats& o : books.owners) {
    const std::int64_t held = o.leased_bytes(), costs = held > o.floor_bytes ? held : o.floor_bytes;
    charged += costs + o.outside_bytes;
    granted += costs + o.held_bytes[static_cast<int>(Klass::Outside)];
    if (o.physical_bytes > held) found.push_back(mismatch(o, "has more physical memory than it holds in the books", o.physical_bytes, held));
    if (o.mapped_bytes > o.physical_bytes) found.push_back(mismatch(o, "has more mapped than there is", o.mapped_bytes, o.physical_bytes));
    if (o.kernel_bytes >= 0 && o.kernel_bytes != o.physical_bytes) {
      found.push_back(mismatch(o, "the kernel counts another number of bytes than it published", o.kernel_bytes, o.physical_bytes));
    }
  }
  if (charged != books.charged_bytes) {
    found.push_back("the total differs from its owners: " + std::to_string(books.charged_bytes) + " != " + std::to_string(charged));
  }
  if (granted > books.capacity_bytes) {  // what was only measured may lie above it
    found.push_back("overrun: " + std::to_string(granted) + " > capacity " + std::to_string(books.capacity_bytes));
  }
  return found;
}

AuditReport Device::audit() {
  account_->reap();
  AuditReport report{};
  report.driver = {-1, -1};
  for (int look = 0; look < kAuditLooks; ++look) {
    report.books = account_->stats();
    report.problems = disagreements(report.books);
    if (report.problems.empty()) break;
    const timespec pause{0, kAuditPause_ns};  // an owner between creating a page and publishing it
    nanosleep(&pause, nullptr);
  }
  if (is_host()) return report;
  report.driver = driver()->memory();
  std::int64_t physical = 0;
  for (const OwnerStats& o : report.books.owners) physical += o.physical_bytes;
  const std::int64_t in_use = report.driver.total_bytes - report.driver.free_bytes;
  if (in_use < physical) {
    report.problems.push_back("the driver has fewer bytes in use than owners created: " + std::to_string(in_use) + " < " + std::to_string(physical));
  }
  return report;
}

}  // namespace kvcached
