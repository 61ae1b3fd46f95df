#include "decode/schedule.hpp"

#include <algorithm>

namespace mars {

namespace {

/// Run `body`. An exception ends `seqs` with an error event each. Returns whether there was none.
template <typename Body>
bool failing(const std::vector<Sequence*>& seqs, std::vector<Accepted>& events, const Body& body) {
    try {
        body();
        return true;
    } catch (...) {
        for (Sequence* seq : seqs) events.push_back(seq->fail(std::current_exception()));
        return false;
    }
}

} // namespace

Schedule::Schedule(Backend& backend, std::int64_t block, std::int64_t mask_id, std::int64_t prefill_tokens, KvBudget budget,
                   CostSource cost, std::optional<std::int64_t> max_rows_per_client, StepRecorder record)
    : backend_(backend), block_(block), mask_id_(mask_id), prefill_tokens_(prefill_tokens), budget_(budget), record_(std::move(record)),
      max_rows_per_client_(max_rows_per_client) {
    if (cost) planner_.emplace(std::move(cost));
    renew(budget_.max_rows);
    publish();
}

void Schedule::add(std::shared_ptr<Sequence> seq) {
    Sequence* const added = seq.get();
    own_.emplace(added, std::move(seq));
    waiting_.add(added);
    publish();
}

std::vector<Accepted> Schedule::iterate() {
    Events events;
    iterate([&events](const Accepted& event) { events.push_back(event); });
    return events;
}

void Schedule::iterate(const std::function<void(const Accepted&)>& deliver) {
    do {
        for (const Accepted& event : forward()) deliver(event);
    } while (phase_ != Phase::begin);
}

std::vector<Accepted> Schedule::forward() {
    Events events;
    has_run_ = false;
    if (phase_ == Phase::begin) {
        drop_finished(events);
        left_ = batch_->chunk();
        phase_ = Phase::prompts;
    }
    if (phase_ == Phase::prompts) {
        if (read_prompt(events)) return events;
        drop_finished(events);
        phase_ = Phase::forced;
    }
    if (phase_ == Phase::forced) {
        phase_ = Phase::decode;
        if (read_forced(events)) return events;
    }
    decode(decoding(), events);
    drop_finished(events);
    // Free the KV memory that the longest sequence needed.
    if (batch_->active.empty() && batch_->capacity() > 0) renew(batch_->num_rows);
    publish();
    phase_ = Phase::begin;
    return events;
}

/// Read one chunk of a prompt, or append what is known of an answer before its first prediction. False if the budget of
/// the iteration is used up, or no prompt is being read.
bool Schedule::read_prompt(Events& events) {
    Sequence* const seq = reading(events);
    if (seq == nullptr || next_chunk(*seq) > left_) return false;
    std::optional<Accepted> beginning;
    const bool good = failing({seq}, events, [&] { beginning = seq->begin(backend_.max_capacity()); });
    if (beginning) events.push_back(std::move(*beginning));
    if (good && events.empty()) {
        const std::int64_t chunk = next_chunk(*seq);
        left_ -= chunk;
        ++turn_;
        if (chunk < seq->num_pending()) {
            run_chunk(*seq, chunk, true, events);
        } else {
            ++num_decoding_;
            const std::vector<StepPlan> first{first_plan(*seq)};
            run(
                {seq}, first,
                [this](Sequence& each, const Predictions& predictions, const StepPlan& fed) {
                    return finish_prompt(each, predictions, fed);
                },
                events);
            batch_->store(*seq); // now, because the next prompt may begin with the same tokens
        }
    }
    drop_finished(events);
    return true;
}

/// Chunks end at multiples of their size, so that a sequence that began with saved entries takes the same steps as others.
std::int64_t Schedule::next_chunk(const Sequence& seq) const {
    return std::min(batch_->chunk() - seq.cursor % batch_->chunk(), seq.num_pending());
}

/// Chunks of the sequence's prompt that are still to be read.
std::int64_t Schedule::num_chunks(const Sequence& seq) const {
    const std::int64_t chunk = batch_->chunk();
    return (seq.num_tokens() - 1) / chunk + 1 - seq.cursor / chunk;
}

/// The sequence whose prompt is read next: the first and the last reader take turns.
///
/// The first reader is the shortest and finishes first. Decoding sequences must stay neighbours, so the last chunk of any
/// other reader waits for it.
Sequence* Schedule::reading(Events& events) {
    admit(events);
    const std::vector<Sequence*>& active = batch_->active;
    const auto first = static_cast<std::size_t>(num_decoding_);
    if (first == active.size()) return nullptr;
    const bool is_lasts_turn = turn_ % 2 == 1 && num_chunks(*active.back()) > 1;
    return is_lasts_turn ? active.back() : active[first];
}

/// Admit one sequence if there is room: the next in the queue, or while prompts are being read the first that has at most
/// half as many chunks as any of them. It begins with the saved entries of its prompt.
void Schedule::admit(Events& events) {
    const auto first = static_cast<std::size_t>(num_decoding_);
    const bool is_beside = first < batch_->active.size();
    if (is_beside && num_chunks(*batch_->active.back()) <= 1) return; // its last chunk waits for the others
    const std::int64_t left = is_beside ? num_chunks(*batch_->active[first]) : 0;
    Sequence* const seq =
        waiting_.first([&](const Sequence& each) { return is_welcome(each) && (!is_beside || 2 * num_chunks(each) <= left); });
    if (seq == nullptr) return;
    std::vector<Sequence*>& active = batch_->active;
    if (static_cast<std::int64_t>(active.size()) >= budget_.max_rows) return;
    active.push_back(seq);
    waiting_.remove(seq);
    for (auto i = static_cast<std::int64_t>(active.size()) - 1; i > num_decoding_; --i) move(i - 1, i, events);
    active[first] = seq;
    failing({seq}, events, [&] { batch_->lookup(*seq, budget_.max_entries(batch_->num_rows)); });
    drop_finished(events);
}

/// Move a sequence to `target`. If the copy fails, the sequence ends; it still moves, but nothing reads its entries.
void Schedule::move(std::int64_t source, std::int64_t target, Events& events) {
    Sequence* const seq = batch_->active[static_cast<std::size_t>(source)];
    if (failing({seq}, events, [&] { batch_->move(source, target); })) return;
    seq->prefix_handle = nullptr;
    batch_->active[static_cast<std::size_t>(target)] = seq;
}

/// Whether the sequence's client has fewer sequences than it may have.
bool Schedule::is_welcome(const Sequence& seq) const {
    if (!max_rows_per_client_ || !seq.client) return true;
    const auto is_same = [&](const Sequence* other) { return other->client == seq.client; };
    return std::count_if(batch_->active.begin(), batch_->active.end(), is_same) < *max_rows_per_client_;
}

std::int64_t Schedule::num_rows_of(const std::string& client) const {
    return std::count_if(own_.begin(), own_.end(), [&](const auto& each) { return each.first->client == client; });
}

std::vector<Sequence*> Schedule::decoding() const { return {batch_->active.begin(), batch_->active.begin() + num_decoding_}; }

/// Feed one chunk of a sequence whose grammar forced more than a step can feed; the other sequences decode meanwhile.
bool Schedule::read_forced(Events& events) {
    for (Sequence* seq : decoding()) {
        if (!batch_->is_behind(*seq, block_)) continue;
        run_chunk(*seq, batch_->max_pending(block_), false, events);
        drop_finished(events);
        return true;
    }
    return false;
}

void Schedule::decode(std::vector<Sequence*> seqs, Events& events) {
    const std::size_t before = events.size();
    for (Sequence* seq : seqs) {
        if (!batch_->fits(*seq))
            events.push_back(seq->finish(FinishReason::capacity));
        else if (!batch_->is_behind(*seq, block_))
            failing({seq}, events, [&] { seq->consult_prompt_lookup(batch_->decode_room(*seq)); });
    }
    if (events.size() > before) {
        drop_finished(events);
        seqs = decoding();
    }
    for (const std::vector<Sequence*>& together : batch_->neighbours(seqs, block_)) {
        std::vector<StepPlan> plans;
        const bool good = failing(together, events, [&] {
            std::vector<std::int64_t> rooms;
            for (const Sequence* seq : together) rooms.push_back(batch_->decode_room(*seq));
            plans = planner_ ? planner_->plans(together, rooms, block_) : widest_plans(together, rooms, block_);
        });
        if (good && run(together, plans, commit_and_accept, events) && record_)
            record_(batch_->step_rows(), batch_->step_slots(), batch_->step_seconds());
    }
}

/// All masks, because the whole prompt is fed anyway.
StepPlan Schedule::first_plan(Sequence& seq) { return widest_plans({&seq}, {batch_->room(seq)}, block_).front(); }

std::optional<Accepted> Schedule::commit_and_accept(Sequence& seq, const Predictions& predictions, const StepPlan& plan) {
    seq.cursor += plan.pending;
    ++seq.stats.forwards;
    return seq.accept(predictions, plan.draft_tokens);
}

bool Schedule::run(const std::vector<Sequence*>& seqs, const std::vector<StepPlan>& plans, const OutputHandler& handle, Events& events) {
    std::vector<Predictions> predictions;
    has_run_ = true;
    if (!failing(seqs, events, [&] { predictions = batch_->step(batch_->index_of(*seqs.front()), plans); })) return false;
    for (std::size_t i = 0; i < seqs.size(); ++i) {
        failing({seqs[i]}, events, [&] {
            std::optional<Accepted> event = handle(*seqs[i], predictions[i], plans[i]);
            if (event) events.push_back(std::move(*event));
            Batch::moved(*seqs[i]);
        });
    }
    return true;
}

/// Feed pending tokens of one sequence without outputs.
void Schedule::run_chunk(Sequence& seq, std::int64_t num_tokens, bool is_chunk, Events& events) {
    has_run_ = true;
    failing({&seq}, events, [&] { batch_->run_chunk(seq, num_tokens, is_chunk); });
}

/// Remove finished sequences and close the gaps: decoding sequences stay first and neighbours, readers keep their order.
void Schedule::drop_finished(Events& events) {
    waiting_.drop_finished([this](const Sequence* seq) { own_.erase(seq); });
    std::vector<Sequence*>& active = batch_->active;
    for (Sequence* seq : active) seq->refresh();
    const auto is_finished = [](const Sequence* seq) { return seq->finish_reason.has_value(); };
    for (auto at = std::find_if(active.rbegin(), active.rend(), is_finished); at != active.rend();
         at = std::find_if(active.rbegin(), active.rend(), is_finished)) { // a sequence whose copy failed is next
        Sequence* const seq = *at;
        batch_->store(*seq);
        std::int64_t gap = active.rend() - at - 1;
        if (gap < num_decoding_) {
            --num_decoding_;
            move(num_decoding_, gap, events);
            gap = num_decoding_;
        }
        for (std::int64_t next = gap + 1; next < static_cast<std::int64_t>(active.size()); ++next) move(next, next - 1, events);
        active.pop_back();
        own_.erase(seq);
    }
    publish();
}

void Schedule::renew(std::int64_t num_rows) {
    batch_ = std::make_unique<Batch>(backend_, num_rows, mask_id_, prefill_tokens_, budget_.max_slots());
}

void Schedule::publish() {
    std::int64_t entries = 0;
    for (const Sequence* seq : batch_->active) entries += seq->cursor;
    num_running_ = static_cast<std::int64_t>(batch_->active.size());
    num_waiting_ = static_cast<std::int64_t>(waiting_.size());
    num_entries_ = entries;
}

Run::Run(std::unique_ptr<Schedule> schedule, const std::vector<Sequence*>& seqs) : schedule_(std::move(schedule)) {
    for (Sequence* seq : seqs) schedule_->add(std::shared_ptr<Sequence>(std::shared_ptr<Sequence>(), seq)); // not owned
}

std::optional<std::vector<Accepted>> Run::next() {
    while (!schedule_->is_idle()) {
        std::vector<Accepted> events = schedule_->forward();
        for (const Accepted& event : events)
            if (event.error) std::rethrow_exception(event.error);
        if (!events.empty() || (schedule_->has_run() && !schedule_->is_idle())) return events;
    }
    return std::nullopt;
}

std::unique_ptr<Run> decode(Backend& backend, const std::vector<Sequence*>& seqs, std::int64_t block, std::int64_t mask_id, CostSource cost,
                            StepRecorder record) {
    const KvBudget budget{static_cast<std::int64_t>(seqs.size())};
    return std::make_unique<Run>(
        std::make_unique<Schedule>(backend, block, mask_id, prefill_chunk, budget, std::move(cost), std::nullopt, std::move(record)), seqs);
}

} // namespace mars
