#include "decode/schedule.hpp"

#include <algorithm>

#include "decode/prefix.hpp"

namespace mars {

Schedule::Schedule(Backend& backend, std::int64_t block, std::int64_t mask_id, std::int64_t prefill_tokens, const KvBudget& budget,
                   std::optional<StepPlanner> planner, std::optional<std::int64_t> max_rows_per_client)
    : backend_(backend), block_(block), batch_(backend, budget.max_rows, mask_id), budget_(budget), planner_(std::move(planner)),
      prefill_(batch_, waiting_, block, prefill_tokens, budget_, max_rows_per_client) {}

std::vector<Accepted> Schedule::step() {
    std::vector<Accepted> accepted;
    for (const std::vector<Sequence*>& seqs : admit(accepted)) {
        error_boundary(seqs, accepted, [&] {
            const std::vector<StepPlan> plans = plan(seqs);
            const std::vector<Predictions> predictions = forward(seqs, plans);
            accept(seqs, plans, predictions, accepted);
        });
    }
    finish(accepted);
    return accepted;
}

void Schedule::steps(const std::function<void(const Accepted&)>& deliver) {
    do {
        for (const Accepted& each : step()) deliver(each);
    } while (has_read());
}

void Schedule::add(std::shared_ptr<Sequence> seq) {
    waiting_.add(std::move(seq));
    publish();
}

std::int64_t Schedule::num_rows_of(const std::string& client) const {
    const std::vector<Sequence*> active = batch_.active();
    return waiting_.size_of(client) +
           std::count_if(active.begin(), active.end(), [&](const Sequence* seq) { return seq->client == client; });
}

std::vector<std::vector<Sequence*>> Schedule::admit(std::vector<Accepted>& accepted) {
    drop_finished(accepted);
    Sequence* const seq = prefill_.next(accepted);
    reader_ = seq;
    publish();
    if (seq == nullptr) return decoding(accepted);
    if (prefill_.begin(*seq, accepted)) return {};
    return {{seq}};
}

std::vector<StepPlan> Schedule::plan(const std::vector<Sequence*>& seqs) {
    if (reader_ == nullptr) return decode_plans(seqs);
    const std::int64_t chunk = prefill_.next_chunk(*reader_);
    return {chunk < reader_->num_pending() ? StepPlan{chunk} : first_plan(*reader_)};
}

std::vector<Predictions> Schedule::forward(const std::vector<Sequence*>& seqs, const std::vector<StepPlan>& plans) {
    std::vector<Predictions> predictions = batch_.forward(seqs, plans);
    if (reader_ == nullptr && planner_) planner_->record(batch_.step_rows(), batch_.step_slots(), batch_.step_seconds);
    return predictions;
}

void Schedule::accept(const std::vector<Sequence*>& seqs, const std::vector<StepPlan>& plans, const std::vector<Predictions>& predictions,
                      std::vector<Accepted>& accepted) {
    for (std::size_t i = 0; i < seqs.size(); ++i) {
        Sequence& seq = *seqs[i];
        const bool is_chunk = reader_ != nullptr && plans[i].pending < seq.num_pending();
        error_boundary({&seq}, accepted, [&] {
            if (is_chunk)
                seq.commit_chunk(plans[i].pending);
            else if (std::optional<Accepted> each = commit_and_accept(seq, predictions[i], plans[i]))
                accepted.push_back(std::move(*each));
        });
        if (seq.prefix_handle) seq.prefix_handle->moved(seq.cursor);
        if (reader_ != nullptr && !is_chunk) batch_.start_decoding(seq);
    }
}

void Schedule::finish(std::vector<Accepted>& accepted) {
    drop_finished(accepted);
    if (reader_ == nullptr && batch_.num_active() == 0) batch_.free();
    publish();
}

void Schedule::drop_finished(std::vector<Accepted>& accepted) {
    waiting_.drop_finished();
    batch_.drop_finished(accepted);
}

std::vector<std::vector<Sequence*>> Schedule::decoding(std::vector<Accepted>& accepted) {
    for (Sequence* seq : batch_.decoding()) {
        if (!batch_.fits(*seq))
            accepted.push_back(seq->finish(FinishReason::capacity));
        else if (!prefill_.is_behind(*seq))
            error_boundary({seq}, accepted, [&] { seq->consult_prompt_lookup(room(*seq)); });
    }
    batch_.drop_finished(accepted);
    std::vector<std::vector<Sequence*>> groups;
    bool is_new = true;
    for (Sequence* seq : batch_.decoding()) {
        const bool is_behind = prefill_.is_behind(*seq);
        if (!is_behind && is_new) groups.emplace_back();
        if (!is_behind) groups.back().push_back(seq);
        is_new = is_behind;
    }
    return groups;
}

std::vector<StepPlan> Schedule::decode_plans(const std::vector<Sequence*>& seqs) {
    std::vector<std::int64_t> rooms;
    std::vector<StepPlan> plans;
    for (const Sequence* seq : seqs) {
        rooms.push_back(room(*seq));
        plans.push_back(seq->widest_plan(rooms.back(), block_));
    }
    return planner_ ? planner_->plans(seqs, rooms, block_) : plans;
}

std::int64_t Schedule::room(const Sequence& seq) const {
    const std::int64_t room = batch_.room(seq);
    const std::optional<std::int64_t> most = budget_.max_slots();
    return most ? std::min(room, *most - seq.num_pending()) : room;
}

StepPlan Schedule::first_plan(const Sequence& seq) const { return seq.widest_plan(batch_.room(seq), block_); }

std::optional<Accepted> Schedule::commit_and_accept(Sequence& seq, const Predictions& predictions, const StepPlan& plan) {
    return seq.commit_and_accept(predictions, plan);
}

void Schedule::publish() {
    std::int64_t entries = 0;
    for (const Sequence* seq : batch_.active()) entries += seq->cursor;
    num_running_ = batch_.num_active();
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
        if (!accepted.empty() || schedule_->has_read()) return accepted;
    }
    return std::nullopt;
}

} // namespace mars
