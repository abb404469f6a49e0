// What lies in the file of a PieceIndex.
#pragma once

#include <pthread.h>

#include <cstdint>

namespace kvcached {

constexpr std::uint64_t kPieceIndexMagic = 0x585049564b4d5250;  // "PRMKVIPX"
constexpr std::uint32_t kPieceIndexVersion = 2;
constexpr std::uint32_t kPieceOwners = 512;
constexpr std::uint32_t kPieceOwnerPins = 31;
constexpr std::int64_t kPieceBatch = 4096;  // slots that get memory together
constexpr std::int64_t kPiecePage = 4096;
constexpr std::int64_t kPieceAhead = std::int64_t{16} << 20;  // memory that is made together, in huge pages, before it is needed
constexpr std::int64_t kLabelBytes = 128;  // of a claim: on a page behind it

// By whom a piece is needed is in `space`, by which tokens in `key`; `position` is its number in its sequence.
struct PieceName {
  std::uint8_t space[16], key[16];
  std::uint32_t position;
};

enum class PieceState : std::uint32_t { Free, Writing, Piece, Doomed, Claimed };

struct PieceSlot {
  PieceState state;
  std::uint32_t owner;  // who writes or has claimed it
  PieceName name;
  std::uint32_t next;  // in its bucket, or of the free slots: slot + 1, 0 at the end
  std::uint32_t pins;
  std::int64_t offset, bytes;  // of the file `pieces`; as booked
  double used_s;
};
static_assert(sizeof(PieceSlot) == 80);

struct PieceOwner {
  std::uint32_t live;
  std::uint32_t pins[kPieceOwnerPins];  // slot + 1 of what it reads, 0: nothing
};

struct PieceStamp {
  std::uint64_t magic;  // 0: not made yet
  std::uint32_t version;
};

struct PieceHeader {
  PieceStamp stamp;
  std::uint32_t ended;
  std::int64_t most_slots, buckets, virtual_bytes;  // `buckets`: a power of two
  std::int64_t backed_slots, made_slots;            // with memory; used at least once
  std::int64_t cursor, limit;                       // of `pieces`: no extent lies between them
  std::int64_t ahead;                               // from the cursor up to here memory is made, or about to be
  pthread_mutex_t lock;
  // These follow from slots and owners:
  std::uint32_t free_slot;  // slot + 1
  std::int64_t booked_bytes, piece_bytes, pieces, writing;
};

}  // namespace kvcached
