// What is done to slots: found, written, read, dropped.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "piece_index_locked.h"

namespace kvcached {
namespace {

bool same(const PieceName& a, const PieceName& b) { return std::memcmp(&a, &b, sizeof(PieceName)) == 0; }

constexpr PieceExtent kNone{-1, 0, 0};

}  // namespace

std::uint32_t& PieceIndex::bucket(const PieceName& name) const {
  std::uint64_t words[2];
  std::memcpy(words, name.key, sizeof words);
  std::uint64_t mixed = (words[0] ^ (words[1] * 0x9e3779b97f4a7c15) ^ name.position) * 0xff51afd7ed558ccd;
  return buckets_[(mixed ^ (mixed >> 32)) & static_cast<std::uint64_t>(header_->buckets - 1)];
}

std::int64_t PieceIndex::find(const PieceName& name) const {
  for (std::uint32_t at = bucket(name); at != 0; at = slots_[at - 1].next) {
    if (same(slots_[at - 1].name, name)) return at - 1;
  }
  return -1;
}

void PieceIndex::link(std::int64_t slot) {
  std::uint32_t& first = bucket(slots_[slot].name);
  put(slots_[slot].next, first);
  put(first, static_cast<std::uint32_t>(slot + 1));
}

void PieceIndex::unlink(std::int64_t slot) {
  std::uint32_t* at = &bucket(slots_[slot].name);
  while (*at != slot + 1) at = &slots_[*at - 1].next;
  put(*at, slots_[slot].next);
}

// Adds a slot in its state to the totals, or takes it from them.
void PieceIndex::count(const PieceSlot& slot, std::int64_t sign) {
  const bool piece = slot.state == PieceState::Piece, writing = slot.state == PieceState::Writing;
  if (piece || writing || slot.state == PieceState::Claimed) header_->booked_bytes += sign * slot.bytes;
  header_->piece_bytes += piece ? sign * slot.bytes : 0;
  header_->pieces += piece ? sign : 0;
  header_->writing += writing ? sign : 0;
}

void PieceIndex::book(PieceSlot& slot, PieceState state) {
  count(slot, -1);
  put(slot.state, state);
  count(slot, 1);
}

bool PieceIndex::has(const PieceName& name) {
  Locked lock(*this);
  return find(name) >= 0;
}

PieceExtent PieceIndex::take(const PieceName& name, std::int64_t bytes, std::int64_t extent_bytes, std::int64_t bound_bytes) {
  if (header_->ended != 0 || header_->booked_bytes + bytes > bound_bytes) return kNone;
  const std::int64_t slot = fresh_slot();
  if (slot < 0) return kNone;
  const std::int64_t offset = fresh_extent(extent_bytes);
  if (offset < 0) return kNone;
  PieceSlot& s = slots_[slot];
  put(header_->free_slot, s.next);
  put(s.name, name);
  put(s.offset, offset);
  put(s.bytes, bytes);
  put(s.owner, owner_);
  return {slot, offset, bytes};
}

PieceExtent PieceIndex::begin(const PieceName& name, std::int64_t bytes, std::int64_t bound_bytes) {
  PieceExtent found = kNone;
  Range ahead;
  {
    Locked lock(*this);
    found = take(name, bytes, bytes, bound_bytes);
    if (found.slot < 0) return kNone;
    book(slots_[found.slot], PieceState::Writing);
    ahead = range_ahead(found, bound_bytes);
  }
  try {
    back(found, ahead);
  } catch (...) {
    abandon(found.slot);
    throw;
  }
  return found;
}

PieceExtent PieceIndex::take_over(const PieceName& old, double used_s, const PieceName& name, std::int64_t bytes) {
  std::int64_t slot = -1;
  {
    Locked lock(*this);
    slot = find(old);
    if (slot < 0) return kNone;
    PieceSlot& s = slots_[slot];
    if (s.used_s != used_s || s.bytes != bytes) return kNone;
    if (s.pins > 0) {
      drop_slot(slot);
      return kNone;
    }
    unlink(slot);
    put(s.owner, owner_);
    book(s, PieceState::Writing);
    put(s.name, name);
  }
  return mapped(slot);
}

bool PieceIndex::commit(std::int64_t slot, double now_s) {
  Locked lock(*this);
  PieceSlot& s = slots_[slot];
  if (header_->ended != 0 || find(s.name) >= 0) {
    free_slot(slot);
    return false;
  }
  put(s.used_s, now_s);
  book(s, PieceState::Piece);
  link(slot);
  return true;
}

void PieceIndex::abandon(std::int64_t slot) {
  Locked lock(*this);
  free_slot(slot);
}

PieceExtent PieceIndex::pin(const PieceName& name) {
  std::int64_t slot = -1;
  {
    Locked lock(*this);
    slot = find(name);
    if (slot < 0) return kNone;
    std::uint32_t* place = owners_[owner_].pins;
    while (place != owners_[owner_].pins + kPieceOwnerPins && *place != 0) ++place;
    if (place == owners_[owner_].pins + kPieceOwnerPins) return kNone;
    put(*place, static_cast<std::uint32_t>(slot + 1));
    put(slots_[slot].pins, slots_[slot].pins + 1);
  }
  return mapped(slot);
}

void PieceIndex::unpin(std::int64_t slot) {
  Locked lock(*this);
  PieceSlot& s = slots_[slot];
  for (std::uint32_t& pin : owners_[owner_].pins) {
    if (pin != slot + 1) continue;
    put(pin, 0u);
    put(s.pins, s.pins - 1);
    if (s.state == PieceState::Doomed && s.pins == 0) free_slot(slot);
    return;
  }
}

void PieceIndex::touch(const PieceName& name, double now_s) {
  Locked lock(*this);
  const std::int64_t slot = find(name);
  if (slot >= 0) put(slots_[slot].used_s, now_s);
}

std::int64_t PieceIndex::drop(const PieceName& name, double used_s) {
  Locked lock(*this);
  const std::int64_t slot = find(name);
  return slot < 0 || (used_s >= 0 && slots_[slot].used_s != used_s) ? 0 : drop_slot(slot);
}

// Of a piece. Returns the bytes that were booked.
std::int64_t PieceIndex::drop_slot(std::int64_t slot) {
  PieceSlot& s = slots_[slot];
  unlink(slot);
  book(s, PieceState::Doomed);
  if (s.pins == 0) free_slot(slot);
  return s.bytes;
}

// Of one that is in no bucket.
void PieceIndex::free_slot(std::int64_t slot) {
  PieceSlot& s = slots_[slot];
  punch(s);
  book(s, PieceState::Free);
  put(s.next, header_->free_slot);
  put(header_->free_slot, static_cast<std::uint32_t>(slot + 1));
}

PieceExtent PieceIndex::claim(const std::string& label, std::int64_t bytes, std::int64_t bound_bytes) {
  const std::int64_t end = (bytes + kPiecePage - 1) / kPiecePage * kPiecePage;
  Locked lock(*this);
  const PieceExtent found = take({}, bytes, end + kPiecePage, bound_bytes);
  if (found.slot < 0) return kNone;
  book(slots_[found.slot], PieceState::Claimed);
  char text[kLabelBytes] = {};
  std::memcpy(text, label.data(), std::min(label.size(), sizeof text - 1));
  if (pwrite(pieces_fd_, text, sizeof text, found.offset + end) == static_cast<ssize_t>(sizeof text)) return found;
  const int code = errno;
  free_slot(found.slot);
  throw system_error("memory of " + path_, code);
}

std::vector<PieceClaim> PieceIndex::claims() {
  std::vector<PieceClaim> found;
  Locked lock(*this);
  for (std::int64_t slot = 0; slot < header_->made_slots; ++slot) {
    const PieceSlot& s = slots_[slot];
    if (s.state != PieceState::Claimed) continue;
    char text[kLabelBytes] = {};
    const std::int64_t end = (s.bytes + kPiecePage - 1) / kPiecePage * kPiecePage;
    if (pread(pieces_fd_, text, sizeof text - 1, s.offset + end) < 0) throw system_error("memory of " + path_, errno);
    found.push_back({text, s.bytes});
  }
  return found;
}

PieceBooks PieceIndex::books() {
  Locked lock(*this);
  return {header_->booked_bytes, header_->piece_bytes, header_->pieces, header_->writing};
}

std::vector<PieceFacts> PieceIndex::pieces() {
  std::vector<PieceFacts> found;
  Locked lock(*this);
  found.reserve(static_cast<std::size_t>(header_->pieces));
  for (std::int64_t slot = 0; slot < header_->made_slots; ++slot) {
    const PieceSlot& s = slots_[slot];
    if (s.state == PieceState::Piece) found.push_back({s.name, s.bytes, s.used_s});
  }
  return found;
}

void PieceIndex::end() {
  Locked lock(*this);
  put(header_->ended, 1u);
  for (std::int64_t slot = 0; slot < header_->made_slots; ++slot) {
    if (slots_[slot].state == PieceState::Piece) drop_slot(slot);
  }
  punch_ahead(header_->ahead);
}

}  // namespace kvcached
