#include "decode/prefill.hpp"

#include <algorithm>

namespace mars {

Prefill::Prefill(Batch& batch, Queue& waiting, std::int64_t block, const Limits& limits, const KvBudget& budget)
    : chunk(std::min(limits.prefill_tokens, batch.backend.max_slots().value_or(limits.prefill_tokens))), max_pending([&] {
          const std::int64_t most = std::max({limits.prefill_tokens, 2 * block, limits.cache_block});
          return std::min({most, batch.backend.max_slots().value_or(most), budget.max_slots().value_or(most)});
      }()),
      batch_(batch), waiting_(waiting), limits_(limits), budget_(budget) {}

Sequence* Prefill::next(std::int64_t left) {
    start_waiting();
    Sequence* const seq = next_prefilling();
    return seq != nullptr && chunk_of(*seq) <= left ? seq : nullptr;
}

void Prefill::start_waiting() {
    Sequence* const seq = batch_.num_active() < limits_.rows() ? next_waiting() : nullptr;
    if (seq != nullptr) {
        if (budget_.num_bytes)
            waiting_.first([&](Sequence& other) { // those that it passes
                if (&other != seq && has_place(other) && !fits(other)) ++other.num_passes;
                return &other == seq;
            });
        batch_.add(waiting_.remove(*seq));
        batch_.lookup(*seq, chunk, budget_.max_entries());
        batch_.drop_finished(); // sequences that could not be moved
    }
    if (budget_.num_bytes)
        is_memory_short = waiting_.first([this](const Sequence& each) { return has_place(each) && !fits(each); }) != nullptr;
}

/// The waiting sequence that starts next: the first one, or while prompts are being read the first that has at most half the chunks
/// of the shortest of them. Others may pass one that waits for memory, `max_passes` times as many as `max_rows`; then they wait until it
/// has started.
Sequence* Prefill::next_waiting() const {
    const std::vector<Sequence*> prefilling = batch_.prefilling();
    if (!prefilling.empty() && chunks_left(*prefilling.back()) <= 1) return nullptr; // the last chunk of that prompt waits for the others
    const auto may_start = [&](const Sequence& seq) {
        return has_place(seq) && (prefilling.empty() || 2 * chunks_left(seq) <= chunks_left(*prefilling.front()));
    };
    if (!budget_.num_bytes) return waiting_.first(may_start);
    const std::int64_t most = max_passes * limits_.rows();
    const Sequence* const late = waiting_.first([&](const Sequence& seq) { return has_place(seq) && seq.num_passes >= most; });
    return waiting_.first([&](const Sequence& seq) { return (late == nullptr || late == &seq) && fits(seq) && may_start(seq); });
}

/// Whether the memory that running sequences leave is enough for `seq`.
bool Prefill::fits(const Sequence& seq) const {
    const std::optional<std::int64_t> left = budget_.left(batch_.active());
    return !left || budget_.entries(seq) <= *left;
}

/// Whether the sequence's client has fewer sequences than it may have.
bool Prefill::has_place(const Sequence& seq) const {
    if (!limits_.max_rows_per_client || !seq.client) return true;
    const std::vector<Sequence*> active = batch_.active();
    const auto is_same = [&](const Sequence* other) { return other->client == seq.client; };
    return std::count_if(active.begin(), active.end(), is_same) < *limits_.max_rows_per_client;
}

/// The sequence whose prompt is read next, or null.
///
/// Odd chunks go to the longest prompt, so that shorter ones cannot starve it. The others go to the shortest, which ends first.
/// Decoding sequences are neighbours, so the last chunk of another sequence waits.
Sequence* Prefill::next_prefilling() const {
    const std::vector<Sequence*> prefilling = batch_.prefilling();
    if (prefilling.empty()) return nullptr;
    const bool longest_is_next = num_chunks % 2 == 1 && chunks_left(*prefilling.back()) > 1;
    return longest_is_next ? prefilling.back() : prefilling.front();
}

std::int64_t Prefill::chunk_of(const Sequence& seq) const {
    const std::int64_t size = std::min(chunk - seq.cursor % chunk, seq.num_pending());
    const std::optional<std::int64_t> stop = seq.next_copy();
    return stop ? std::min(size, *stop - seq.cursor) : size;
}

std::int64_t Prefill::chunks_left(const Sequence& seq) const { return (seq.num_tokens() - 1) / chunk + 1 - seq.cursor / chunk; }

} // namespace mars
