#include "kvcached/error.h"

#include <cstring>

namespace kvcached {

const char* error_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::OutOfMemory: return "OutOfMemory";
    case ErrorKind::LimitExceeded: return "LimitExceeded";
    case ErrorKind::FloorUnavailable: return "FloorUnavailable";
    case ErrorKind::OverRelease: return "OverRelease";
    case ErrorKind::DoubleFree: return "DoubleFree";
    case ErrorKind::ForeignSlot: return "ForeignSlot";
    case ErrorKind::BadLayout: return "BadLayout";
    case ErrorKind::BadRequest: return "BadRequest";
    case ErrorKind::UnknownOwner: return "UnknownOwner";
    case ErrorKind::TooManyOwners: return "TooManyOwners";
    case ErrorKind::AccountMismatch: return "AccountMismatch";
    case ErrorKind::DriverUnavailable: return "DriverUnavailable";
    case ErrorKind::DriverFailed: return "DriverFailed";
    case ErrorKind::DeadDriver: return "DeadDriver";
    case ErrorKind::ClosedHandle: return "ClosedHandle";
    case ErrorKind::SystemFailed: return "SystemFailed";
  }
  return "BadRequest";
}

Error system_error(const std::string& what, int code) {
  return Error(ErrorKind::SystemFailed, what + ": " + std::strerror(code), {{"errno", code}});
}

}  // namespace kvcached
