// Where pieces lie: slots and extents that are free, memory behind them, and what follows from slots when their books are lost.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <utility>

#include "kvcached/huge_pages.h"
#include "piece_index_locked.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvcached {
namespace {

long g_die_in = 0;
int g_refuse = 0;

std::int64_t huge_pages_of(std::int64_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

std::int64_t extent_of(const PieceSlot& s) {
  return pages_of(s.bytes) + (s.state == PieceState::Claimed ? kPiecePage : 0);
}

}  // namespace

void allocate_memory(int fd, std::int64_t offset, std::int64_t bytes) {
  int rc = g_refuse;
  while (rc == 0 && fallocate(fd, 0, offset, bytes) != 0) {
    if (errno != EINTR) rc = errno;
  }
  if (rc != 0) throw system_error("memory of a pool of KV", rc);
}

void piece_step() {
  if (g_die_in > 0 && --g_die_in == 0) kill(getpid(), SIGKILL);
}

void PieceIndex::rehearse_deaths(long die_in, int refuse) {
  g_die_in = die_in;
  g_refuse = refuse;
}

// One that is the first of the free ones. -1: all are used.
std::int64_t PieceIndex::fresh_slot() {
  if (header_->free_slot != 0) return header_->free_slot - 1;
  const std::int64_t slot = header_->made_slots;
  if (slot == header_->most_slots) return -1;
  if (slot == header_->backed_slots) {
    const std::int64_t more = std::min(kPieceBatch, header_->most_slots - slot);
    const auto* const base = reinterpret_cast<const std::uint8_t*>(header_);
    const auto start = reinterpret_cast<const std::uint8_t*>(slots_ + slot) - base;
    allocate_memory(index_fd_, start, more * static_cast<std::int64_t>(sizeof(PieceSlot)));
    put(header_->backed_slots, slot + more);
  }
  put(header_->made_slots, slot + 1);  // it is all zeros: free, the last of them
  put(header_->free_slot, static_cast<std::uint32_t>(slot + 1));
  return slot;
}

// Extents are handed out one behind the other; at the end it goes on in the largest gap that others have left. Its address
// costs nothing: the file is far larger than what may lie in it. -1: no gap is large enough.
std::int64_t PieceIndex::fresh_extent(std::int64_t bytes) {
  bytes = pages_of(bytes);
  if (header_->cursor + bytes > header_->limit) {
    std::vector<std::pair<std::int64_t, std::int64_t>> used{{header_->virtual_bytes, header_->virtual_bytes}};
    for (std::int64_t slot = 0; slot < header_->made_slots; ++slot) {
      const PieceSlot& s = slots_[slot];
      if (s.state != PieceState::Free) used.emplace_back(s.offset, s.offset + extent_of(s));
    }
    std::sort(used.begin(), used.end());
    std::int64_t end = 0, best = 0, from = 0;
    for (const auto& [first, last] : used) {
      if (first - end > best) {
        best = first - end;
        from = end;
      }
      end = std::max(end, last);
    }
    if (best < bytes) return -1;
    punch_ahead(header_->ahead);
    put(header_->limit, std::int64_t{0});
    put(header_->cursor, from);
    put(header_->limit, from + best);
  }
  const std::int64_t at = header_->cursor;
  put(header_->cursor, at + bytes);
  return at;
}

// What is to be made with the newest extent, for it and those that will follow. Nothing while a pool is small, or near its
// bound, which what was made and is in no piece yet exceeds by this at most.
PieceIndex::Range PieceIndex::range_ahead(const PieceExtent& extent, std::int64_t bound_bytes) {
  if (header_->cursor <= header_->ahead || header_->booked_bytes < kPieceAhead) return {};
  if (header_->booked_bytes + kPieceAhead > bound_bytes) return {};
  const std::int64_t from = huge_pages_of(std::max(extent.offset, header_->ahead));
  const std::int64_t end = huge_pages_of(std::max(from + kPieceAhead, header_->cursor));
  if (end > header_->limit) return {};
  put(header_->ahead, end);
  return {from, end};
}

// What was made ahead of the cursor, up to `end`, will be in no piece.
void PieceIndex::punch_ahead(std::int64_t end) {
  const std::int64_t bytes = end - header_->cursor;
  if (bytes > 0) fallocate(pieces_fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, header_->cursor, bytes);
  put(header_->ahead, std::int64_t{0});
}

void PieceIndex::back(const PieceExtent& extent, const Range& ahead) {
  if (ahead.end > 0) {
    make_huge(pieces_fd_, ahead.offset, ahead.end - ahead.offset);  // else in small ones, each with its extent
    Locked lock(*this);
    if (header_->ended != 0) punch_ahead(ahead.end);
  }
  allocate_memory(pieces_fd_, extent.offset, pages_of(extent.bytes));
  mapped(extent.slot);
}

// All pages of an extent at once: one by one they would be found missing.
PieceExtent PieceIndex::mapped(std::int64_t slot) {
  const PieceSlot& s = slots_[slot];
  const PieceExtent extent{slot, s.offset, s.bytes};
  std::lock_guard<std::mutex> guard(seen_guard_);
  if (static_cast<std::size_t>(slot) >= seen_.size()) seen_.resize(static_cast<std::size_t>(slot + kPieceBatch), 0);
  std::int64_t& seen = seen_[static_cast<std::size_t>(slot)];
  const std::int64_t end = extent.offset + pages_of(extent.bytes);
  if (seen != end) {
    // Kernels before 5.14 do not know it; pages are mapped one by one then.
    madvise(memory_ + extent.offset, static_cast<std::size_t>(pages_of(extent.bytes)), MADV_POPULATE_WRITE);
    seen = end;
  }
  return extent;
}

void PieceIndex::punch(const PieceSlot& s) {
  piece_step();
  fallocate(pieces_fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, s.offset, extent_of(s));
  piece_step();
}

void PieceIndex::recover() {
  PieceHeader& h = *header_;
  std::memset(buckets_, 0, static_cast<std::size_t>(h.buckets) * sizeof *buckets_);
  h.free_slot = 0;
  h.booked_bytes = h.piece_bytes = h.pieces = h.writing = 0;
  for (std::int64_t slot = 0; slot < h.made_slots; ++slot) slots_[slot].pins = 0;
  for (std::uint32_t owner = 0; owner < kPieceOwners; ++owner) {
    for (const std::uint32_t pin : owners_[owner].pins) {
      if (pin != 0) ++slots_[pin - 1].pins;
    }
  }
  for (std::int64_t slot = h.made_slots - 1; slot >= 0; --slot) {
    PieceSlot& s = slots_[slot];
    count(s, 1);
    if (s.state == PieceState::Piece) link(slot);
    if (s.state == PieceState::Doomed && s.pins == 0) {
      free_slot(slot);
    } else if (s.state == PieceState::Free) {
      s.next = h.free_slot;
      h.free_slot = static_cast<std::uint32_t>(slot + 1);
    }
  }
}

// What a dead owner was writing, had claimed, and was reading.
void PieceIndex::give_back_all_of(std::uint32_t owner) {
  for (std::int64_t slot = 0; slot < header_->made_slots; ++slot) {
    const PieceSlot& s = slots_[slot];
    if (s.owner == owner && (s.state == PieceState::Writing || s.state == PieceState::Claimed)) free_slot(slot);
  }
  for (std::uint32_t& pin : owners_[owner].pins) {
    if (pin == 0) continue;
    const std::int64_t slot = pin - 1;
    PieceSlot& s = slots_[slot];
    put(pin, 0u);
    put(s.pins, s.pins - 1);
    if (s.state == PieceState::Doomed && s.pins == 0) free_slot(slot);
  }
  put(owners_[owner].live, 0u);
}

}  // namespace kvcached
