#include "decode/prefill.hpp"

#include <algorithm>

namespace mars {

Prefill::Prefill(Batch& batch, Queue& waiting, std::int64_t block, std::int64_t prefill_tokens, const KvBudget& budget,
                 std::optional<std::int64_t> max_rows_per_client)
    : batch_(batch), waiting_(waiting), budget_(budget), max_rows_per_client_(max_rows_per_client),
      chunk_(std::min(prefill_tokens, batch.backend.max_slots().value_or(prefill_tokens))),
      max_pending_([&] { // tokens of an answer that a step feeds at once
          const std::int64_t most = std::max(prefill_tokens, 2 * block);
          return std::min({most, batch.backend.max_slots().value_or(most), budget.max_slots().value_or(most)});
      }()),
      left_(chunk_) {}

Sequence* Prefill::next(std::vector<Accepted>& accepted) {
    if (left_) {
        admit(accepted);
        Sequence* const seq = reader();
        if (seq != nullptr && chunk_of(*seq) <= *left_) return seq;
        left_ = std::nullopt;
        for (Sequence* each : batch_.decoding())
            if (is_behind(*each)) return each;
    }
    left_ = chunk_;
    return nullptr;
}

bool Prefill::begin(Sequence& seq, std::vector<Accepted>& accepted) const {
    const std::size_t before = accepted.size();
    error_boundary({&seq}, accepted, [&] {
        if (std::optional<Accepted> each = seq.begin(batch_.backend.max_capacity())) accepted.push_back(std::move(*each));
    });
    return accepted.size() > before;
}

std::int64_t Prefill::next_chunk(const Sequence& seq) {
    if (!left_) return max_pending_; // of a sequence that is behind
    const std::int64_t chunk = chunk_of(seq);
    *left_ -= chunk;
    ++num_chunks_;
    return chunk;
}

void Prefill::admit(std::vector<Accepted>& accepted) {
    Sequence* const seq = next_waiting();
    if (seq == nullptr || batch_.num_active() >= budget_.max_rows) return;
    batch_.add(waiting_.remove(*seq), accepted);
    batch_.lookup(*seq, chunk_, budget_.max_entries(batch_.num_rows));
    batch_.drop_finished(accepted); // sequences that could not be moved
}

/// The waiting sequence that starts next: the first one, or while prompts are being read the first that has at most half the chunks
/// of the shortest of them.
Sequence* Prefill::next_waiting() const {
    const std::vector<Sequence*> readers = batch_.readers();
    if (readers.empty()) return waiting_.first([this](const Sequence& seq) { return may_start(seq); });
    if (chunks_left(*readers.back()) <= 1) return nullptr; // the last chunk of that prompt waits for the others
    const std::int64_t shortest = chunks_left(*readers.front());
    return waiting_.first([&](const Sequence& seq) { return may_start(seq) && 2 * chunks_left(seq) <= shortest; });
}

/// Whether the sequence's client has fewer sequences than it may have.
bool Prefill::may_start(const Sequence& seq) const {
    if (!max_rows_per_client_ || !seq.client) return true;
    const std::vector<Sequence*> active = batch_.active();
    const auto is_same = [&](const Sequence* other) { return other->client == seq.client; };
    return std::count_if(active.begin(), active.end(), is_same) < *max_rows_per_client_;
}

/// The sequence whose prompt is read next, or null.
///
/// Odd chunks go to the longest prompt, so that shorter ones cannot starve it. The others go to the shortest, which ends first.
/// Decoding sequences are neighbours, so the last chunk of another sequence waits.
Sequence* Prefill::reader() const {
    const std::vector<Sequence*> readers = batch_.readers();
    if (readers.empty()) return nullptr;
    const bool is_lasts_turn = num_chunks_ % 2 == 1 && chunks_left(*readers.back()) > 1;
    return is_lasts_turn ? readers.back() : readers.front();
}

/// Tokens up to the next multiple of the chunk size, also for a sequence that began with saved entries.
std::int64_t Prefill::chunk_of(const Sequence& seq) const { return std::min(chunk_ - seq.cursor % chunk_, seq.num_pending()); }

std::int64_t Prefill::chunks_left(const Sequence& seq) const { return (seq.num_tokens() - 1) / chunk_ + 1 - seq.cursor / chunk_; }

} // namespace mars
