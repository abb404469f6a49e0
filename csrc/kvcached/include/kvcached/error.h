// Errors of kvcached: every refusal is an exception with numbers; nothing here ever aborts the process.
#pragma once

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace kvcached {

// One kind per Python exception class of the same name in prism.memory.errors.
enum class ErrorKind {
  OutOfMemory,         // the account (or the driver) has not enough bytes
  LimitExceeded,       // the owner's own limit is in the way
  FloorUnavailable,    // a floor cannot be guaranteed: others hold the memory
  OverRelease,         // more given back than held
  DoubleFree,          // the slot is not in use
  ForeignSlot,         // the slot was never one of this pool's
  BadLayout,           // a KV layout that cannot be laid out in pages
  BadRequest,          // any other argument out of range
  UnknownOwner,        // the owner left, was reaped, or never was
  TooManyOwners,       // the account's table is full
  AccountMismatch,     // the account file belongs to a device of another size or version
  DriverUnavailable,   // no usable driver on this machine
  DriverFailed,        // one driver call failed; the state before it was restored
  DeadDriver,          // the driver is beyond recovery: this process must be replaced
  ClosedHandle,        // used after close, after a re-divide, or in a forked child
  SystemFailed,        // the operating system refused (errno in the numbers)
};

const char* error_name(ErrorKind kind);

using Numbers = std::vector<std::pair<std::string, std::int64_t>>;

class Error : public std::exception {
 public:
  Error(ErrorKind kind, std::string message, Numbers numbers = {})
      : kind_(kind), message_(std::move(message)), numbers_(std::move(numbers)) {}

  ErrorKind kind() const noexcept { return kind_; }
  const Numbers& numbers() const noexcept { return numbers_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  ErrorKind kind_;
  std::string message_;
  Numbers numbers_;
};

// `what` failed with errno `code`.
Error system_error(const std::string& what, int code);

}  // namespace kvcached
