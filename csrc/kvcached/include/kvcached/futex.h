// Sleeping on a word of shared memory. The words are shared between processes, so these are not the private futexes.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvcached {

// Sleeps while `word` still holds `seen`, at most `timeout_ns`. May return early for no reason: callers loop.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t timeout_ns);

// Wakes everyone who sleeps on `word`, in any process.
void futex_wake_all(const std::atomic<std::uint32_t>& word);

std::int64_t now_ns();  // CLOCK_MONOTONIC

}  // namespace kvcached
