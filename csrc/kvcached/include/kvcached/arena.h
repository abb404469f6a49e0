// Address space of one engine, divided for the model it runs, and divided again for the next one.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "kvcached/pool.h"

namespace kvcached {

// One group of layers of a model: hybrid models have several, each a pool of its own.
struct Group {
  KvLayout layout;
  std::int64_t max_tokens;
  std::int64_t lease_bytes;  // or kElastic
};

// Its pools keep it alive.
class Arena final : public Child, public std::enable_shared_from_this<Arena> {
 public:
  Arena(std::shared_ptr<Owner> owner, std::int64_t virtual_bytes);  // no physical memory
  ~Arena() override;

  // Closes the pools of the division before and lays the new groups out from the start of the range. Leases that both
  // divisions need are kept, and with them their physical pages. BadLayout, OutOfMemory and LimitExceeded leave the old one as it was.
  // With a timeout, other owners have that long to give way before it is OutOfMemory.
  std::vector<std::shared_ptr<Pool>> divide(const std::vector<Group>& groups, double timeout_s = 0);
  void close() override;

  Address address() const { return address_; }
  std::int64_t virtual_bytes() const { return virtual_bytes_; }
  const std::shared_ptr<Owner>& owner() const { return owner_; }

 private:
  // `held` bytes are leased already, `needed` are what the groups start with.
  std::vector<std::shared_ptr<Pool>> make_pools(const std::vector<Group>& groups, const std::vector<Geometry>& geometries,
                                                std::int64_t held, std::int64_t needed, double timeout_s);
  std::vector<std::shared_ptr<Pool>> living() const;

  const std::shared_ptr<Owner> owner_;
  std::int64_t virtual_bytes_;
  Address address_ = 0;
  std::mutex lock_;
  std::vector<std::weak_ptr<Pool>> pools_;
};

}  // namespace kvcached
