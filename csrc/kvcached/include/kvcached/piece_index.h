// The books and the memory of a machine's pool of KV pieces (prism/kv/host_pool.py), shared by every process that uses it.
//
//   DIRECTORY/index    | header, lock | owners | buckets | slots ... |      mapped, grows as slots are used
//   DIRECTORY/pieces   | extent | extent |   hole   | extent | ...          sparse, mapped as a whole, far larger than the bound
//
// A slot is a piece, one that is being written, or memory that one process has claimed:
//
//   Free --begin--> Writing --commit--> Piece --drop--> Free               (its memory is punched out of the file)
//                      ^                  |  \--drop, while it is read--> Doomed --last unpin--> Free
//                      +----take_over-----+                                 (same memory, another name)
//   Free --claim--> Claimed --abandon--> Free
//
// Every change is one store of a slot's state, made under a robust lock, so that whoever dies at any moment leaves each slot in
// one of these states. Buckets, free slots, pins and totals follow from slots and owners: who gets the lock of a dead holder
// makes them anew. An owner is one opened index; it holds a lock of the kernel's on a byte of the file, by which its death is
// seen. What a dead one was writing, had claimed or was reading is given back by reap(), or by who gets its number next.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "kvcached/piece_index_file.h"

namespace kvcached {

struct PieceExtent {
  std::int64_t slot, offset, bytes;
};

struct PieceFacts {
  PieceName name;
  std::int64_t bytes;
  double used_s;
};

struct PieceClaim {
  std::string label;
  std::int64_t bytes;
};

struct PieceBooks {
  std::int64_t booked_bytes, piece_bytes, pieces, writing;
};

class PieceIndex {
 public:
  // Opens the index in `directory`, which is there, or makes it for `slots` pieces in `virtual_bytes`. Raises SystemFailed, with
  // EBUSY for one of another version that is in use (one that nobody uses is made anew).
  PieceIndex(const std::string& directory, std::int64_t slots, std::int64_t virtual_bytes);
  ~PieceIndex();
  PieceIndex(const PieceIndex&) = delete;
  PieceIndex& operator=(const PieceIndex&) = delete;

  std::uint8_t* memory() const { return memory_; }
  std::int64_t virtual_bytes() const { return header_->virtual_bytes; }
  int pieces_fd() const { return pieces_fd_; }

  // In a child after a fork: it is an owner of its own, and its parent's death is seen by others again.
  void renew();

  bool has(const PieceName& name);

  // Room for a piece, for this owner to write; its memory is there and mapped. slot -1: there is no room within `bound_bytes`
  // (or the pool has ended). Raises SystemFailed where the machine has no memory.
  PieceExtent begin(const PieceName& name, std::int64_t bytes, std::int64_t bound_bytes);
  // The same in the memory of `old`, a piece of as many bytes that was used last at `used_s`. slot -1: it is not there, was used
  // since, or is read, and then it is dropped.
  PieceExtent take_over(const PieceName& old, double used_s, const PieceName& name, std::int64_t bytes);
  // It is written and found from now on. False: another one of its name is there, and this one is gone.
  bool commit(std::int64_t slot, double now_s);
  void abandon(std::int64_t slot);  // what is written or claimed is given back

  // The piece, kept where it is and as it is until unpin(). slot -1: it is not here.
  PieceExtent pin(const PieceName& name);
  void unpin(std::int64_t slot);

  void touch(const PieceName& name, double now_s);
  // Returns the bytes that are no longer booked; 0: it is not there, or was used since `used_s` (if that is not below 0).
  std::int64_t drop(const PieceName& name, double used_s = -1);

  PieceExtent claim(const std::string& label, std::int64_t bytes, std::int64_t bound_bytes);
  std::vector<PieceClaim> claims();

  PieceBooks books();
  std::vector<PieceFacts> pieces();
  void reap();  // what dead owners left is given back
  void end();   // the pool's memory is given back; what is read goes when it was read, and nothing new is taken in

  // For tests: the process is killed before its n-th store to shared memory from now on, 0: never; memory is refused with an
  // errno, 0: not.
  static void rehearse_deaths(long die_in, int refuse);

 private:
  class Locked;
  friend class Locked;
  struct Range {
    std::int64_t offset = 0, end = 0;  // of the file `pieces`
  };

  void attach(const std::string& directory, std::int64_t slots, std::int64_t virtual_bytes);
  void initialise(std::int64_t slots, std::int64_t virtual_bytes);
  void map();
  bool nobody_uses_it() const;
  void release();
  void enter();
  void leave();

  // All below: with the lock held.
  void recover();
  void give_back_all_of(std::uint32_t owner);
  std::int64_t find(const PieceName& name) const;
  void link(std::int64_t slot);
  void unlink(std::int64_t slot);
  std::int64_t fresh_slot();
  std::int64_t fresh_extent(std::int64_t bytes);
  Range range_ahead(const PieceExtent& extent, std::int64_t bound_bytes);
  void punch_ahead(std::int64_t end);
  PieceExtent take(const PieceName& name, std::int64_t bytes, std::int64_t extent_bytes, std::int64_t bound_bytes);
  void count(const PieceSlot& slot, std::int64_t sign);
  void book(PieceSlot& slot, PieceState state);  // puts it into a state, and totals with it
  void free_slot(std::int64_t slot);
  std::int64_t drop_slot(std::int64_t slot);
  void punch(const PieceSlot& slot);

  void back(const PieceExtent& extent, const Range& ahead);  // without the lock: memory for all of both, the first mapped
  PieceExtent mapped(std::int64_t slot);
  std::uint32_t& bucket(const PieceName& name) const;

  std::string path_;
  int lock_fd_ = -1, pieces_fd_ = -1, index_fd_ = -1;
  std::uint32_t owner_ = 0;
  bool entered_ = false;
  std::int64_t index_bytes_ = 0;
  PieceHeader* header_ = nullptr;
  PieceOwner* owners_ = nullptr;
  std::uint32_t* buckets_ = nullptr;
  PieceSlot* slots_ = nullptr;
  std::uint8_t* memory_ = nullptr;
  std::mutex seen_guard_;
  std::vector<std::int64_t> seen_;  // by slot: the end of its extent, if this process has it mapped
};

}  // namespace kvcached
