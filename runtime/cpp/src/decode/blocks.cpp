// Block commit: whole blocks are committed (runtime/decode/blocks.py).
#include <algorithm>
#include <map>
#include <string>

#include <mars/errors.hpp>

#include "decode/schedule.hpp"

namespace mars {

namespace {

/// The same loop with another way to commit: cursors move when whole blocks are full.
class BlockSchedule : public Schedule {
  public:
    BlockSchedule(Backend& backend, std::int64_t block, std::int64_t mask_id, std::int64_t num_rows, std::int64_t cache_block)
        : Schedule(backend, block, mask_id, prefill_chunk, KvBudget{num_rows}), cache_block_(cache_block) {}

  private:
    /// Length of the sequence's current block. The last block before the end of the context is shorter, or empty.
    std::int64_t length(const Sequence& seq) const { return std::min(cache_block_, backend_.max_capacity() - seq.cursor); }

    bool is_full(const Sequence& seq) const { return seq.num_pending() >= std::max(std::int64_t{1}, length(seq)); }

    StepPlan first_plan(Sequence& seq) override { return {seq.num_pending(), 0, 0}; }

    /// A commit: the pending tokens are final, and the prediction after them is kept.
    std::optional<Accepted> finish_prompt(Sequence& seq, const Predictions& predictions, const StepPlan& plan) override {
        seq.cursor += plan.pending;
        ++seq.stats.forwards;
        first_[seq.index] = predictions;
        return std::nullopt;
    }

    void decode(std::vector<Sequence*> seqs, Events& events) override {
        if (std::all_of(seqs.begin(), seqs.end(), [this](const Sequence* seq) { return is_full(*seq); }))
            commit(seqs, events);
        else
            fill(seqs, events);
    }

    /// Write all full blocks into the cache. Rows whose context is full end.
    void commit(std::vector<Sequence*> seqs, Events& events) {
        for (Sequence* seq : seqs)
            if (length(*seq) == 0) events.push_back(seq->finish(FinishReason::capacity));
        drop_finished(events);
        seqs = decoding();
        if (seqs.empty()) return;
        std::vector<StepPlan> plans;
        for (Sequence* seq : seqs) plans.push_back(first_plan(*seq));
        run(
            seqs, plans,
            [this](Sequence& seq, const Predictions& predictions, const StepPlan& fed) { return finish_prompt(seq, predictions, fed); },
            events);
    }

    /// One inner step for the sequences whose block is not full; the others wait.
    void fill(const std::vector<Sequence*>& seqs, Events& events) {
        // A waiting sequence between two working ones feeds one mask that is discarded: its cursor does not move.
        std::vector<StepPlan> plans(seqs.size(), StepPlan{0, 0, 1});
        std::vector<std::size_t> working;
        for (std::size_t i = 0; i < seqs.size(); ++i) {
            if (is_full(*seqs[i])) continue;
            const StepPlan inner = inner_plan(*seqs[i]);
            if (inner.slots() == 0) { // the commit predicted its only token
                events.push_back(*seqs[i]->accept(first_.at(seqs[i]->index), 0));
                continue;
            }
            plans[i] = inner;
            working.push_back(i);
        }
        if (working.empty()) return;
        const std::vector<Sequence*> span(&seqs[working.front()], &seqs[working.back()] + 1);
        const std::vector<StepPlan> fed(&plans[working.front()], &plans[working.back()] + 1);
        const auto take_inner = [&](Sequence& seq, const Predictions& predictions, const StepPlan& plan) -> std::optional<Accepted> {
            const auto is_row = [&](std::size_t i) { return seqs[i] == &seq; };
            if (std::none_of(working.begin(), working.end(), is_row)) return std::nullopt;
            ++seq.stats.forwards;
            return seq.accept(plan.pending > 0 ? predictions : first_.at(seq.index).then(predictions), 0);
        };
        run(span, fed, take_inner, events);
        std::stable_sort(events.begin(), events.end(), [](const Accepted& a, const Accepted& b) { return a.seq < b.seq; });
    }

    StepPlan inner_plan(const Sequence& seq) const {
        const std::int64_t pending = seq.num_pending();
        return {pending, 0, std::min(seq.max_masks(block_), std::max(std::int64_t{1}, length(seq) - pending) - 1)};
    }

    const std::int64_t cache_block_;
    std::map<std::int64_t, Predictions> first_; // by sequence: the last commit's prediction for the block's first token
};

} // namespace

std::unique_ptr<Run> decode_blocks(Backend& backend, const std::vector<Sequence*>& seqs, std::int64_t block, std::int64_t mask_id,
                                   std::int64_t cache_block) {
    if (const auto most = backend.max_slots(); most && cache_block > *most)
        throw SessionError("a cache block of " + std::to_string(cache_block) + " tokens does not fit a step of " + std::to_string(*most) +
                           " slots; give a smaller one");
    if (std::any_of(seqs.begin(), seqs.end(), [](const Sequence* seq) { return seq->config().is_exact(); }))
        throw SessionError("exact mode needs cursor commit: block commit feeds accepted tokens against a frozen cache and verifies none;"
                           " leave commit as it is, or give a tau");
    auto schedule = std::make_unique<BlockSchedule>(backend, block, mask_id, static_cast<std::int64_t>(seqs.size()), cache_block);
    return std::make_unique<Run>(std::move(schedule), seqs);
}

} // namespace mars
