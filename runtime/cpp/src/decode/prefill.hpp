// runtime/decode/schedule.py: starting waiting sequences and reading their prompts in chunks.
#pragma once

#include <cstdint>
#include <vector>

#include <mars/batcher.hpp>

#include "decode/batch.hpp"
#include "decode/queue.hpp"

namespace mars {

constexpr std::int64_t max_passes = 4; ///< times max_rows: sequences that may pass one that waits for memory

/// Chunks between two decode steps: of prompts, `prefill_tokens` at most, and one of a long forced text.
///
/// Prompts are read in chunks of one size, so that a prompt takes the same forwards every time.
class Prefill {
  public:
    Prefill(Batch& batch, Queue& waiting, std::int64_t block, const Limits& limits, const KvBudget& budget);

    const std::int64_t chunk, max_pending; ///< max_pending: tokens of an answer that a step feeds at once
    bool is_memory_short = false;          ///< a sequence waits for memory
    std::int64_t num_chunks = 0;           ///< that were read so far: prompts take turns

    /// The sequence whose prompt is read next; null if its chunk has more than `left` tokens.
    Sequence* next(std::int64_t left);

    /// Whether more tokens are pending than a step feeds, for example after a long forced text.
    bool needs_chunk(const Sequence& seq) const { return seq.num_pending() > max_pending && batch_.fits(seq); }

    /// Start a waiting sequence, before the others whose prompts are being read, if there is room.
    void start_waiting();

    /// Tokens up to the next multiple of the chunk size, also for a sequence that began with saved entries.
    std::int64_t chunk_of(const Sequence& seq) const;

  private:
    Sequence* next_waiting() const;
    bool fits(const Sequence& seq) const;
    bool has_place(const Sequence& seq) const;
    Sequence* next_prefilling() const;
    std::int64_t chunks_left(const Sequence& seq) const;

    Batch& batch_;
    Queue& waiting_;
    const Limits& limits_;
    const KvBudget& budget_;
};

} // namespace mars
