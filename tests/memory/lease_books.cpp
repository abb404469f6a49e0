// The lease's books for Python (test_lease_books.py): a C face of kvcached::LeaseBooks, nothing else of kvcached is linked.
#include "kvcached/lease_books.h"

using kvcached::BlockCounts;
using kvcached::LeaseBooks;

extern "C" {

LeaseBooks* books_new(std::int64_t blocks, std::int64_t block_slots, std::int64_t max_slots, std::int64_t held, int elastic) {
  return new LeaseBooks({blocks, block_slots, max_slots}, held, elastic != 0);
}
void books_delete(LeaseBooks* books) { delete books; }

std::int64_t books_held(LeaseBooks* books) { return books->held(); }
std::int64_t books_target(LeaseBooks* books) { return books->target(); }
std::int64_t books_available(LeaseBooks* books, const BlockCounts* now) { return books->available(*now); }
std::int64_t books_room(LeaseBooks* books, const BlockCounts* now) { return books->room(*now); }
std::int64_t books_needed(LeaseBooks* books, const BlockCounts* now, std::int64_t slots) { return books->needed(*now, slots); }
std::int64_t books_unneeded(LeaseBooks* books, const BlockCounts* now, std::int64_t keep) { return books->unneeded(*now, keep); }
std::int64_t books_surplus(LeaseBooks* books, const BlockCounts* now, std::int64_t high) { return books->surplus(*now, high); }
std::int64_t books_returnable(LeaseBooks* books, const BlockCounts* now) { return books->returnable(*now); }
const char* books_problem(LeaseBooks* books, const BlockCounts* now) { return books->problem(*now); }

void books_grant(LeaseBooks* books, std::int64_t blocks) { books->grant(blocks); }
void books_raise_target(LeaseBooks* books, std::int64_t blocks) { books->raise_target(blocks); }
void books_keep_ensured(LeaseBooks* books, std::int64_t blocks) { books->keep_ensured(blocks); }
void books_forget_ensured(LeaseBooks* books) { books->forget_ensured(); }
void books_set_leased(LeaseBooks* books, std::int64_t target) { books->set_leased(target); }
void books_shrink(LeaseBooks* books, std::int64_t blocks) { books->shrink(blocks); }
void books_follow_use(LeaseBooks* books, const BlockCounts* now, std::int64_t ready) { books->follow_use(*now, ready); }
std::int64_t books_take_back(LeaseBooks* books, const BlockCounts* now) { return books->take_back(*now); }
void books_promise(LeaseBooks* books, std::int64_t slots) { books->promise(slots); }
void books_fulfil(LeaseBooks* books, std::int64_t slots) { books->fulfil(slots); }
void books_begin_refill(LeaseBooks* books) { books->begin_refill(); }
void books_end_refill(LeaseBooks* books) { books->end_refill(); }

}  // extern "C"
