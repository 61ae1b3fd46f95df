#include "decode/blocks.hpp"

#include <algorithm>
#include <string>

#include <mars/errors.hpp>

namespace mars {

void check_blocks(const Backend& backend, const std::vector<Sequence*>& seqs, std::int64_t cache_block) {
    if (const auto most = backend.max_slots(); most && cache_block > *most)
        throw SessionError("a cache block of " + std::to_string(cache_block) + " tokens does not fit a step of " + std::to_string(*most) +
                           " slots; give a smaller one");
    if (std::any_of(seqs.begin(), seqs.end(), [](const Sequence* seq) { return seq->config().is_exact(); }))
        throw SessionError("exact mode needs cursor commit: block commit feeds accepted tokens against a frozen cache and verifies none;"
                           " leave commit as it is, or give a tau");
}

std::vector<Accepted> BlockSchedule::step() {
    std::vector<Accepted> accepted = Schedule::step();
    std::stable_sort(accepted.begin(), accepted.end(), [](const Accepted& a, const Accepted& b) { return a.seq < b.seq; });
    return accepted;
}

/// All sequences if their blocks are full, to commit them; else those whose block is not.
std::vector<std::vector<Sequence*>> BlockSchedule::decoding(std::vector<Accepted>& accepted) {
    plans_.clear();
    std::vector<Sequence*> seqs = batch_.decoding();
    if (std::all_of(seqs.begin(), seqs.end(), [this](const Sequence* seq) { return is_full(*seq); })) {
        for (Sequence* seq : seqs)
            if (length(*seq) == 0) accepted.push_back(seq->finish(FinishReason::capacity));
        batch_.drop_finished(accepted);
        seqs = batch_.decoding();
        for (const Sequence* seq : seqs) plans_[seq->index] = {seq->num_pending()};
        if (seqs.empty()) return {};
        return {seqs};
    }
    std::vector<std::size_t> working;
    for (std::size_t i = 0; i < seqs.size(); ++i) {
        Sequence& seq = *seqs[i];
        if (is_full(seq)) continue;
        const StepPlan plan = inner_plan(seq);
        if (plan.slots() > 0) {
            plans_[seq.index] = plan;
            working.push_back(i);
        } else { // one-token mode at the start of a block: the commit predicted its token
            error_boundary({&seq}, accepted, [&] { accepted.push_back(*seq.accept(first_.at(seq.index), 0)); });
        }
    }
    if (working.empty()) return {};
    // Neighbouring sequences run together. The cursor of a sequence that waits does not move.
    return {{&seqs[working.front()], &seqs[working.back()] + 1}};
}

/// A sequence that waits between two working ones feeds one mask, whose prediction is not used.
std::vector<StepPlan> BlockSchedule::decode_plans(const std::vector<Sequence*>& seqs) {
    std::vector<StepPlan> plans;
    for (const Sequence* seq : seqs) {
        const auto at = plans_.find(seq->index);
        plans.push_back(at == plans_.end() ? StepPlan{0, 0, 1} : at->second);
    }
    return plans;
}

std::optional<Accepted> BlockSchedule::commit_and_accept(Sequence& seq, const Predictions& predictions, const StepPlan& plan) {
    if (reader_ == nullptr && plans_.count(seq.index) == 0) return std::nullopt;
    ++seq.stats.forwards;
    if (reader_ != nullptr || is_full(seq)) { // a commit, whose prediction is kept
        seq.cursor += plan.pending;
        first_[seq.index] = predictions;
        return std::nullopt;
    }
    return seq.accept(plan.pending > 0 ? predictions : first_.at(seq.index).then(predictions), 0);
}

/// Tokens of the sequence's current block; at the end of the context fewer, even none.
std::int64_t BlockSchedule::length(const Sequence& seq) const { return std::min(cache_block_, backend_.max_capacity() - seq.cursor); }

bool BlockSchedule::is_full(const Sequence& seq) const { return seq.num_pending() >= std::max(std::int64_t{1}, length(seq)); }

StepPlan BlockSchedule::inner_plan(const Sequence& seq) const {
    const std::int64_t pending = seq.num_pending();
    return {pending, 0, std::min(seq.max_masks(block_), std::max(std::int64_t{1}, length(seq) - pending) - 1)};
}

} // namespace mars
