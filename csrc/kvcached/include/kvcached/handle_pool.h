// The physical pages of one owner: those mapped, and spare ones kept for the next map.
//
// Creating a page costs a hundred times more than mapping one (CUDA), so pages that lose their address are kept as spares
// while the owner's leases cover them. Invariant: mapped + spare = physical <= budget <= what the account's books hold.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kvcached/account_file.h"
#include "kvcached/driver.h"

namespace kvcached {

class HandlePool {
 public:
  HandlePool(std::shared_ptr<Driver> driver, Published& published) : driver_(std::move(driver)), published_(published) {}
  ~HandlePool();

  void raise_budget(std::int64_t bytes);  // after the account granted them
  void lower_budget(std::int64_t bytes);  // before they go back to the account: destroys spares that no longer fit

  // `count` pages of `bytes`: spares first, then new ones; where the device refuses one, spares of other kinds make room.
  // Throws as Driver::create does; what was made by then is spare.
  void take(Handle* out, std::int64_t count, std::int64_t bytes, bool exportable = false);
  void give(const Handle* handles, std::int64_t count, std::int64_t bytes, bool exportable = false);  // now spare
  std::int64_t destroy_spares();                                             // returns bytes

  std::int64_t spare_bytes() const;
  std::int64_t budget_bytes() const;

 private:
  struct Spare {
    Handle handle;
    std::int64_t bytes;
  };
  void create(Handle* out, std::int64_t count, std::int64_t bytes, bool exportable);
  void destroy(const std::vector<Spare>& pages);
  std::vector<Spare> pick_over(std::int64_t most_bytes);  // spares beyond `most_bytes` of physical memory, taken out of the books

  std::shared_ptr<Driver> driver_;
  Published& published_;
  mutable std::mutex lock_;
  std::map<std::pair<std::int64_t, bool>, std::vector<Handle>> spares_;  // by page size and whether they can be exported
  std::int64_t spare_ = 0, physical_ = 0, budget_ = 0;
};

}  // namespace kvcached
