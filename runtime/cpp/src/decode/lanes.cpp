#include "decode/lanes.hpp"

#include <algorithm>

namespace mars {

namespace {

constexpr std::int64_t max_passes = 4; // times the sequences that may run: sequences that may pass one that waits for memory

} // namespace

Lanes::Lanes(KvBudget budget, std::optional<std::int64_t> max_rows_per_client, Open open)
    : budget_(budget), max_rows_per_client_(max_rows_per_client), open_(std::move(open)) {
    if (!budget_.num_bytes) {
        lanes_.push_back({open_(budget_), budget_.max_rows, 0});
        only_ = lanes_.front().schedule.get();
    }
    publish();
}

void Lanes::add(std::shared_ptr<Sequence> seq) {
    if (!budget_.num_bytes)
        lanes_.front().schedule->add(std::move(seq));
    else
        waiting_.add(std::move(seq));
    publish();
}

void Lanes::steps(const std::function<void(const Accepted&)>& deliver) {
    waiting_.drop_finished();
    if (budget_.num_bytes) start_rows();
    publish();
    for (const Lane& lane : lanes_) lane.schedule->steps(deliver);
    if (budget_.num_bytes) // frees their memory
        lanes_.erase(std::remove_if(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.schedule->is_idle(); }), lanes_.end());
    publish();
}

/// Give a place to each waiting sequence that has one, in the order of their turns.
void Lanes::start_rows() {
    std::vector<const Sequence*> passed;
    const Sequence* blocked = nullptr;
    while (num_rows_of_all() < budget_.max_rows) {
        Sequence* const seq = waiting_.first(
            [&](const Sequence& each) { return is_welcome(each) && std::find(passed.begin(), passed.end(), &each) == passed.end(); });
        if (seq == nullptr) break;
        Lane* const lane = lane_for(*seq, budget_.max_rows - num_rows_of_all());
        if (lane == nullptr) {
            if (blocked == nullptr) {
                blocked = seq;
                if (blocked_ != blocked) num_passes_ = 0;
                blocked_ = blocked;
            }
            passed.push_back(seq);
            continue;
        }
        if (blocked != nullptr && num_passes_++ >= max_passes * budget_.max_rows) return;
        lane->schedule->add(waiting_.remove(*seq));
    }
    if (blocked == nullptr && num_rows_of_all() < budget_.max_rows) blocked_ = nullptr;
}

/// A batch with a free sequence for `seq`: the one with the shortest sequences, or a new one; null if memory is short. `places`: sequences
/// that may still start.
Lanes::Lane* Lanes::lane_for(const Sequence& seq, std::int64_t places) {
    const std::int64_t need = budget_.row_bytes(seq), limit = budget_.short_bytes(), free = left();
    Lane* best = nullptr;
    for (Lane& lane : lanes_)
        if (lane.row_bytes >= need && lane.used() < lane.num_rows && (best == nullptr || lane.row_bytes < best->row_bytes)) best = &lane;
    if (best != nullptr) return best;
    if (need <= limit && limit <= free) return open(std::min(places, free / limit), limit);
    if (need > free) return nullptr;
    return open(std::clamp<std::int64_t>((budget_.fixed ? free : free / 2) / need, 1, places), need);
}

Lanes::Lane* Lanes::open(std::int64_t num_rows, std::int64_t row_bytes) {
    KvBudget budget = budget_;
    budget.max_rows = num_rows;
    budget.num_bytes = num_rows * row_bytes;
    lanes_.push_back({open_(budget), num_rows, row_bytes});
    return &lanes_.back();
}

/// Whether the sequence's client has fewer sequences than it may have.
bool Lanes::is_welcome(const Sequence& seq) const {
    if (!max_rows_per_client_ || !seq.client) return true;
    std::int64_t count = 0;
    for (const Lane& lane : lanes_) count += lane.schedule->num_rows_of(*seq.client);
    return count < *max_rows_per_client_;
}

std::int64_t Lanes::left() const {
    std::int64_t free = budget_.num_bytes.value_or(0);
    for (const Lane& lane : lanes_) free -= lane.num_rows * lane.row_bytes;
    return free;
}

std::int64_t Lanes::num_rows_of_all() const {
    std::int64_t count = 0;
    for (const Lane& lane : lanes_) count += lane.used();
    return count;
}

void Lanes::publish() {
    std::int64_t running = 0, waiting = waiting_.size(), entries = 0, seqs = 0;
    for (const Lane& lane : lanes_) {
        running += lane.used(); // sequences with a place start in this iteration or read their prompts after another
        entries += lane.schedule->num_entries();
        seqs += lane.num_rows;
    }
    if (budget_.num_bytes) seqs += left() / std::max<std::int64_t>(1, budget_.short_bytes());
    num_rows_ = blocked_ != nullptr ? running : std::min(seqs, budget_.max_rows);
    num_running_ = running;
    num_waiting_ = waiting;
    num_entries_ = entries;
}

} // namespace mars
