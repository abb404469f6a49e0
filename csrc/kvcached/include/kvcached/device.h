// A device by name, its account, and the drivers of the owners that this process registers on it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kvcached/account.h"
#include "kvcached/driver.h"
#include "kvcached/owner.h"

namespace kvcached {

struct AuditEntry {
  OwnerStats owner;
  std::vector<std::string> problems;
};

struct AuditReport {
  AccountStats books;
  DeviceMemory driver;  // what the driver says about the whole device, -1 where it does not
  std::vector<std::string> problems;
};

struct DeviceOptions {
  std::int64_t capacity_bytes = 0;  // 0: attach to an account that exists
  std::int64_t page_bytes = 2 << 20;  // host devices; a GPU has its own granularity
  std::string account_directory;
  std::string cuda_library;  // empty: libcuda.so.1
};

class Device {
 public:
  // "host:N" or "cuda:N". Opening neither starts threads nor takes memory; a GPU's driver is initialised when it is first needed,
  // so that a process may open a device, fork, and the child use it.
  Device(const std::string& name, const DeviceOptions& options);

  std::shared_ptr<Owner> enter(const std::string& owner, std::int64_t floor_bytes, std::int64_t limit_bytes);
  Account& account() const { return *account_; }
  const std::shared_ptr<Account>& shared_account() const { return account_; }
  // Books against the kernel (host) or the driver (CUDA). Looks again for a moment where owners are just changing something.
  AuditReport audit();
  const std::string& name() const { return name_; }
  const std::string& account_path() const { return path_; }
  bool is_host() const { return index_of_cuda_ < 0; }

 private:
  std::shared_ptr<Driver> driver();

  std::string name_;
  DeviceOptions options_;
  int index_of_cuda_ = -1;
  std::string path_;
  std::shared_ptr<Account> account_;
  std::mutex lock_;
  std::uint32_t cuda_fork_generation_ = 0;
  std::shared_ptr<Driver> cuda_;  // one per process; host devices have one per owner, so that the kernel can tell owners apart
};

// Compares one view of the books with what the kernel said; empty if they agree.
std::vector<std::string> disagreements(const AccountStats& books);

}  // namespace kvcached
