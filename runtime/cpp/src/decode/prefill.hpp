// runtime/decode/prefill.py: starting waiting sequences and reading their prompts in chunks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "decode/batch.hpp"
#include "decode/queue.hpp"

namespace mars {

constexpr std::int64_t prefill_chunk = 256; ///< prompt tokens of one prefill forward when no other requests wait

/// Chunks between two decode steps: of prompts, `prefill_tokens` at most, and one of a long forced text.
///
/// Prompts are read in chunks of one size, so that a prompt takes the same forwards every time.
class Prefill {
  public:
    Prefill(Batch& batch, Queue& waiting, std::int64_t block, std::int64_t prefill_tokens, const KvBudget& budget,
            std::optional<std::int64_t> max_rows_per_client);

    /// The sequence that feeds a chunk next; null, once in an iteration, if all others decode.
    Sequence* next(std::vector<Accepted>& accepted);

    /// Append the tokens that are known without a prediction; whether there were any.
    bool begin(Sequence& seq, std::vector<Accepted>& accepted) const;

    /// Take the next chunk of a sequence from the tokens of this iteration; returns its length.
    std::int64_t next_chunk(const Sequence& seq);

    /// Whether more tokens are pending than a step feeds, for example after a long forced text.
    bool is_behind(const Sequence& seq) const { return seq.num_pending() > max_pending_ && batch_.fits(seq); }

    /// Start a waiting sequence, before the others whose prompts are being read, if there is room.
    void admit(std::vector<Accepted>& accepted);

  private:
    Sequence* next_waiting() const;
    bool may_start(const Sequence& seq) const;
    Sequence* reader() const;
    std::int64_t chunk_of(const Sequence& seq) const;
    std::int64_t chunks_left(const Sequence& seq) const;

    Batch& batch_;
    Queue& waiting_;
    const KvBudget& budget_;
    const std::optional<std::int64_t> max_rows_per_client_;
    const std::int64_t chunk_, max_pending_;
    std::optional<std::int64_t> left_; // prompt tokens of this iteration; no value after them
    std::int64_t num_chunks_ = 0;      // that were read so far: prompts take turns
};

} // namespace mars
