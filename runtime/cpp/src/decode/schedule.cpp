#include "decode/schedule.hpp"

#include <algorithm>

namespace mars {

namespace {

/// Run `body`. An exception ends `rows` with an error event each. Returns whether there was none.
template <typename Body>
bool failing(const std::vector<Row*>& rows, std::vector<Accepted>& events, const Body& body) {
    try {
        body();
        return true;
    } catch (...) {
        for (Row* row : rows) events.push_back(row->fail(std::current_exception()));
        return false;
    }
}

} // namespace

Schedule::Schedule(Backend& backend, std::int64_t block, std::int64_t mask_id, std::int64_t prefill_tokens, KvBudget budget,
                   CostSource cost, std::optional<std::int64_t> max_rows_per_client, StepRecorder record)
    : backend_(backend), block_(block), mask_id_(mask_id), prefill_tokens_(prefill_tokens), budget_(budget), record_(std::move(record)),
      max_rows_per_client_(max_rows_per_client) {
    if (cost) policy_.emplace(std::move(cost));
    renew(budget_.max_rows);
    publish();
}

void Schedule::add(std::shared_ptr<Row> row) {
    Row* const added = row.get();
    own_.emplace(added, std::move(row));
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
    // Free the KV memory that the longest row needed.
    if (batch_->active.empty() && batch_->capacity() > 0) renew(batch_->num_rows);
    publish();
    phase_ = Phase::begin;
    return events;
}

/// Read one chunk of a prompt, or append what is known of an answer before its first prediction. False if the budget of
/// the iteration is used up, or no prompt is being read.
bool Schedule::read_prompt(Events& events) {
    Row* const row = reading(events);
    if (row == nullptr || next_chunk(*row) > left_) return false;
    std::optional<Accepted> beginning;
    const bool good = failing({row}, events, [&] { beginning = row->begin(backend_.max_capacity()); });
    if (beginning) events.push_back(std::move(*beginning));
    if (good && events.empty()) {
        const std::int64_t chunk = next_chunk(*row);
        left_ -= chunk;
        ++turn_;
        if (chunk < row->num_pending()) {
            feed(*row, chunk, true, events);
        } else {
            ++num_decoding_;
            const std::vector<Feed> first{first_feed(*row)};
            run(
                {row}, first,
                [this](Row& each, const Predictions& predictions, const Feed& fed) { return finish_prompt(each, predictions, fed); },
                events);
            batch_->keep(*row); // now, because the next prompt may begin with the same tokens
        }
    }
    drop_finished(events);
    return true;
}

/// Chunks end at multiples of their size, so that a row that began with saved entries takes the same steps as others.
std::int64_t Schedule::next_chunk(const Row& row) const {
    return std::min(batch_->chunk() - row.cursor % batch_->chunk(), row.num_pending());
}

/// Chunks of the row's prompt that are still to be read.
std::int64_t Schedule::num_chunks(const Row& row) const {
    const std::int64_t chunk = batch_->chunk();
    return (row.num_tokens() - 1) / chunk + 1 - row.cursor / chunk;
}

/// The row whose prompt is read next: the first and the last reader take turns.
///
/// The first reader is the shortest and finishes first. Decoding rows must stay neighbours, so the last chunk of any
/// other reader waits for it.
Row* Schedule::reading(Events& events) {
    admit(events);
    const std::vector<Row*>& active = batch_->active;
    const auto first = static_cast<std::size_t>(num_decoding_);
    if (first == active.size()) return nullptr;
    const bool is_lasts_turn = turn_ % 2 == 1 && num_chunks(*active.back()) > 1;
    return is_lasts_turn ? active.back() : active[first];
}

/// Admit one row if there is room: the next in the queue, or while prompts are being read the first that has at most
/// half as many chunks as any of them. It begins with the saved entries of its prompt.
void Schedule::admit(Events& events) {
    const auto first = static_cast<std::size_t>(num_decoding_);
    const bool is_beside = first < batch_->active.size();
    if (is_beside && num_chunks(*batch_->active.back()) <= 1) return; // its last chunk waits for the others
    const std::int64_t left = is_beside ? num_chunks(*batch_->active[first]) : 0;
    Row* const row = waiting_.first([&](const Row& each) { return is_welcome(each) && (!is_beside || 2 * num_chunks(each) <= left); });
    if (row == nullptr) return;
    std::vector<Row*>& active = batch_->active;
    if (static_cast<std::int64_t>(active.size()) >= budget_.max_rows) return;
    active.push_back(row);
    waiting_.remove(row);
    for (auto i = static_cast<std::int64_t>(active.size()) - 1; i > num_decoding_; --i) move(i - 1, i, events);
    active[first] = row;
    failing({row}, events, [&] { batch_->recall(*row, budget_.max_entries(batch_->num_rows)); });
    drop_finished(events);
}

/// Move a row to `target`. If the copy fails, the row ends; it still moves, but nothing reads its entries.
void Schedule::move(std::int64_t source, std::int64_t target, Events& events) {
    Row* const row = batch_->active[static_cast<std::size_t>(source)];
    if (failing({row}, events, [&] { batch_->move(source, target); })) return;
    row->stem = nullptr;
    batch_->active[static_cast<std::size_t>(target)] = row;
}

/// Whether the row's client has fewer rows than it may have.
bool Schedule::is_welcome(const Row& row) const {
    if (!max_rows_per_client_ || !row.client) return true;
    const auto is_same = [&](const Row* other) { return other->client == row.client; };
    return std::count_if(batch_->active.begin(), batch_->active.end(), is_same) < *max_rows_per_client_;
}

std::int64_t Schedule::num_rows_of(const std::string& client) const {
    return std::count_if(own_.begin(), own_.end(), [&](const auto& each) { return each.first->client == client; });
}

std::vector<Row*> Schedule::decoding() const { return {batch_->active.begin(), batch_->active.begin() + num_decoding_}; }

/// Feed one chunk of a row whose grammar forced more than a step can feed; the other rows decode meanwhile.
bool Schedule::read_forced(Events& events) {
    for (Row* row : decoding()) {
        if (!batch_->is_behind(*row, block_)) continue;
        feed(*row, batch_->max_pending(block_), false, events);
        drop_finished(events);
        return true;
    }
    return false;
}

void Schedule::decode(std::vector<Row*> rows, Events& events) {
    const std::size_t before = events.size();
    for (Row* row : rows) {
        if (!batch_->fits(*row))
            events.push_back(row->finish(FinishReason::capacity));
        else if (!batch_->is_behind(*row, block_))
            failing({row}, events, [&] { row->consult_lookup(batch_->decode_room(*row)); });
    }
    if (events.size() > before) {
        drop_finished(events);
        rows = decoding();
    }
    for (const std::vector<Row*>& together : batch_->neighbours(rows, block_)) {
        std::vector<Feed> feeds;
        const bool good = failing(together, events, [&] {
            std::vector<std::int64_t> rooms;
            for (const Row* row : together) rooms.push_back(batch_->decode_room(*row));
            feeds = policy_ ? policy_->feeds(together, rooms, block_) : widest_feeds(together, rooms, block_);
        });
        if (good && run(together, feeds, commit_and_accept, events) && record_)
            record_(batch_->step_rows(), batch_->step_slots(), batch_->step_seconds());
    }
}

/// A full window, because the whole prompt is fed anyway.
Feed Schedule::first_feed(Row& row) { return widest_feeds({&row}, {batch_->room(row)}, block_).front(); }

std::optional<Accepted> Schedule::commit_and_accept(Row& row, const Predictions& predictions, const Feed& feed) {
    row.cursor += feed.pending;
    ++row.stats.forwards;
    return row.accept(predictions, feed.proposals);
}

bool Schedule::run(const std::vector<Row*>& rows, const std::vector<Feed>& feeds, const OutputHandler& handle, Events& events) {
    std::vector<Predictions> predictions;
    has_run_ = true;
    if (!failing(rows, events, [&] { predictions = batch_->step(batch_->index_of(*rows.front()), feeds); })) return false;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        failing({rows[i]}, events, [&] {
            std::optional<Accepted> event = handle(*rows[i], predictions[i], feeds[i]);
            if (event) events.push_back(std::move(*event));
            Batch::moved(*rows[i]);
        });
    }
    return true;
}

/// Feed pending tokens of one row without outputs.
void Schedule::feed(Row& row, std::int64_t num_tokens, bool is_chunk, Events& events) {
    has_run_ = true;
    failing({&row}, events, [&] { batch_->feed(row, num_tokens, is_chunk); });
}

/// Remove finished rows and close the gaps: decoding rows stay first and neighbours, readers keep their order.
void Schedule::drop_finished(Events& events) {
    waiting_.drop_finished([this](const Row* row) { own_.erase(row); });
    std::vector<Row*>& active = batch_->active;
    for (Row* row : active) row->refresh();
    const auto is_finished = [](const Row* row) { return row->finish_reason.has_value(); };
    for (auto at = std::find_if(active.rbegin(), active.rend(), is_finished); at != active.rend();
         at = std::find_if(active.rbegin(), active.rend(), is_finished)) { // a row whose copy failed is next
        Row* const row = *at;
        batch_->keep(*row);
        std::int64_t gap = active.rend() - at - 1;
        if (gap < num_decoding_) {
            --num_decoding_;
            move(num_decoding_, gap, events);
            gap = num_decoding_;
        }
        for (std::int64_t next = gap + 1; next < static_cast<std::int64_t>(active.size()); ++next) move(next, next - 1, events);
        active.pop_back();
        own_.erase(row);
    }
    publish();
}

void Schedule::renew(std::int64_t num_rows) {
    batch_ = std::make_unique<Batch>(backend_, num_rows, mask_id_, prefill_tokens_, budget_.max_slots());
}

void Schedule::publish() {
    std::int64_t entries = 0;
    for (const Row* row : batch_->active) entries += row->cursor;
    num_running_ = static_cast<std::int64_t>(batch_->active.size());
    num_waiting_ = static_cast<std::int64_t>(waiting_.size());
    num_entries_ = entries;
}

Run::Run(std::unique_ptr<Schedule> schedule, const std::vector<Row*>& rows) : schedule_(std::move(schedule)) {
    for (Row* row : rows) schedule_->add(std::shared_ptr<Row>(std::shared_ptr<Row>(), row)); // not owned
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

std::unique_ptr<Run> decode(Backend& backend, const std::vector<Row*>& rows, std::int64_t block, std::int64_t mask_id, CostSource cost,
                            StepRecorder record) {
    const KvBudget budget{static_cast<std::int64_t>(rows.size())};
    return std::make_unique<Run>(
        std::make_unique<Schedule>(backend, block, mask_id, prefill_chunk, budget, std::move(cost), std::nullopt, std::move(record)), rows);
}

} // namespace mars
