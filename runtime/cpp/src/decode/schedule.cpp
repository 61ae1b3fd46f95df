#include "decode/schedule.hpp"

#include <algorithm>

#include <mars/errors.hpp>

#include "decode/prefix.hpp"

namespace mars {

Schedule::Schedule(Backend& backend, std::int64_t block, std::int64_t mask_id, const Limits& limits, std::optional<StepPlanner> planner,
                   const std::optional<KvBudget>& budget)
    : backend_(backend), block_(block), limits_(limits), budget_(budget.value_or(KvBudget{limits.rows()})), planner_(std::move(planner)),
      batch_(backend, limits.rows(), mask_id, budget_.num_bytes && budget_.by_row), prefill_(batch_, waiting_, block, limits_, budget_) {
    const std::int64_t slots = std::min(backend.max_slots().value_or(limits.cache_block), budget_.max_slots().value_or(limits.cache_block));
    if (limits.cache_block > slots)
        throw SessionError("a cache block of " + std::to_string(limits.cache_block) + " tokens does not fit a step of " +
                           std::to_string(slots) + " slots; give a smaller one");
    publish();
}

std::vector<Accepted> Schedule::step() {
    for (Sequence* seq : batch_.active()) seq->refresh();
    drop_finished();
    if (stage_ == Stage::start) left_ = prefill_.chunk; // prompt tokens of this step
    Sequence* const seq = stage_ == Stage::decode ? nullptr : prefill_.next(left_);
    publish();
    if (seq != nullptr) {
        left_ -= feed_chunk(*seq, prefill_.chunk_of(*seq));
        stage_ = Stage::prompts;
    } else if (Sequence* const late = stage_ == Stage::decode ? nullptr : behind()) {
        feed_chunk(*late, prefill_.max_pending);
        stage_ = Stage::decode;
    } else {
        decode();
    }
    publish();
    return batch_.take_outcomes();
}

void Schedule::add(std::shared_ptr<Sequence> seq) {
    seq->block = block_;
    seq->cache_block = limits_.cache_block;
    waiting_.add(std::move(seq));
    publish();
}

/// The first decoding sequence with more pending tokens than a step feeds, or null.
Sequence* Schedule::behind() const {
    for (Sequence* seq : batch_.decoding())
        if (prefill_.needs_chunk(*seq)) return seq;
    return nullptr;
}

/// Feed the next `chunk` known tokens of one sequence, with masks if it is the last chunk; returns its length. Tokens that are known
/// without a prediction come first, as a chunk of length 0.
std::int64_t Schedule::feed_chunk(Sequence& seq, std::int64_t chunk) {
    batch_.ending({&seq}, [&] {
        if (std::optional<Accepted> known = seq.begin(backend_.max_capacity())) {
            batch_.outcomes.push_back(std::move(*known));
            chunk = 0;
            return;
        }
        const bool is_last = chunk == seq.num_pending();
        ++prefill_.num_chunks;
        const bool is_copied = seq.next_copy() == seq.cursor + chunk;
        StepPlan plan{chunk};
        if (is_last) {
            const std::int64_t room = batch_.room(seq), num = std::min(limits_.rows(), num_running_ + num_waiting_);
            plan = planner_ ? planner_->prompt_plan(seq, room, num) : seq.widest_plan(room);
        }
        take(seq, batch_.forward({&seq}, {plan}).front(), plan);
        if (is_last)
            batch_.start_decoding(seq);
        else if (is_copied)
            batch_.store(seq);
    });
    drop_finished();
    return chunk;
}

/// One forward of all decoding sequences, the end of a step. Those whose context is full end.
void Schedule::decode() {
    stage_ = Stage::start;
    for (Sequence* seq : batch_.decoding()) {
        if (!batch_.fits(*seq))
            batch_.outcomes.push_back(seq->finish(FinishReason::capacity));
        else if (!prefill_.needs_chunk(*seq))
            batch_.ending({seq}, [&] { seq->consult_prompt_lookup(room(*seq)); });
    }
    batch_.drop_finished();
    const std::vector<Sequence*> decoding = batch_.decoding();
    const auto needs_chunk = [this](const Sequence* seq) { return prefill_.needs_chunk(*seq); };
    for (auto first = decoding.begin(), last = first; first != decoding.end(); first = last) { // groups of neighbours
        last = std::find_if(first + 1, decoding.end(), [&](const Sequence* seq) { return needs_chunk(seq) != needs_chunk(*first); });
        if (needs_chunk(*first)) continue;
        const std::vector<Sequence*> seqs(first, last);
        batch_.ending(seqs, [&] {
            const std::vector<StepPlan> plans = plans_of(seqs);
            const std::vector<Predictions> predictions = batch_.forward(seqs, plans);
            if (planner_ && batch_.is_prepared)
                planner_->learned_cost->record(batch_.step_rows(), batch_.step_slots(), batch_.step_seconds);
            for (std::size_t i = 0; i < seqs.size(); ++i) batch_.ending({seqs[i]}, [&] { take(*seqs[i], predictions[i], plans[i]); });
        });
    }
    drop_finished();
    if (batch_.num_active() == 0) batch_.free();
}

/// The plans of these sequences for a decode step.
std::vector<StepPlan> Schedule::plans_of(const std::vector<Sequence*>& seqs) {
    std::vector<std::int64_t> rooms;
    for (const Sequence* seq : seqs) rooms.push_back(room(*seq));
    if (planner_) return planner_->plans(seqs, rooms);
    std::vector<StepPlan> plans;
    for (std::size_t i = 0; i < seqs.size(); ++i) plans.push_back(seqs[i]->widest_plan(rooms[i]));
    return plans;
}

/// Take the predictions of a sequence; those of a chunk that is not the last are not used.
void Schedule::take(Sequence& seq, const Predictions& predictions, const StepPlan& plan) {
    if (plan.pending < seq.num_pending())
        seq.commit_chunk(plan.pending);
    else if (std::optional<Accepted> each = seq.commit_and_accept(predictions, plan))
        batch_.outcomes.push_back(std::move(*each));
    if (seq.is_reproducible) seq.num_reproducible = seq.cursor;
}

void Schedule::drop_finished() {
    waiting_.drop_finished();
    batch_.drop_finished();
}

/// Slots of a decode step after the sequence's pending tokens.
std::int64_t Schedule::room(const Sequence& seq) const {
    const std::int64_t room = batch_.room(seq);
    const std::optional<std::int64_t> most = budget_.max_slots();
    return most ? std::min(room, *most - seq.num_pending()) : room;
}

void Schedule::publish() {
    const std::vector<Sequence*> active = batch_.active();
    const auto running = static_cast<std::int64_t>(active.size());
    std::int64_t entries = 0, most = limits_.rows();
    for (const Sequence* seq : active) entries += seq->cursor;
    if (const auto left = budget_.left(active)) {
        const bool is_short = !waiting_.empty() && prefill_.is_memory_short;
        most = std::min(most, running + (is_short ? 0 : *left / std::max<std::int64_t>(1, budget_.half_share())));
    }
    num_rows_ = most;
    num_running_ = running;
    num_waiting_ = waiting_.size();
    num_entries_ = entries;
}

Run::Run(std::unique_ptr<Schedule> schedule, const std::vector<Sequence*>& seqs) : schedule_(std::move(schedule)) {
    for (Sequence* seq : seqs) schedule_->add(std::shared_ptr<Sequence>(std::shared_ptr<Sequence>(), seq)); // not owned
}

std::optional<std::vector<Accepted>> Run::next() {
    while (!schedule_->is_idle()) {
        std::vector<Accepted> accepted = schedule_->step();
        for (const Accepted& each : accepted)
            if (each.error) std::rethrow_exception(each.error);
        if (!accepted.empty() || schedule_->is_in_step()) return accepted;
    }
    return std::nullopt;
}

} // namespace mars
