// No Python file: batches of rows of different lengths, until libmars admits rows by their own entries.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "decode/schedule.hpp"

namespace mars {

/// A schedule within a KV budget, whose sequences join by the memory that each of them needs.
///
/// The sequences of a batch are all as long as the longest. So a sequence joins a batch whose sequences are long enough, or it opens one
/// in the memory that is left. Sequences that need at most half of an equal share get one batch of as many sequences as possible. A
/// batch of longer sequences takes at most half of the memory that is left, but at least one sequence. Four times as many sequences as
/// may run pass one that waits for memory; then the others wait until it has started. Each batch takes a step of its own.
/// Without a limit of bytes there is one batch. One thread owns it, except where noted.
class Lanes {
  public:
    using Open = std::function<std::unique_ptr<Schedule>(const KvBudget& budget)>;

    Lanes(KvBudget budget, std::optional<std::int64_t> max_rows_per_client, Open open);

    /// Queue a sequence, as Schedule::add.
    void add(std::shared_ptr<Sequence> seq);

    /// The steps of one iteration of each batch, each delivered as it is run.
    void steps(const std::function<void(const Accepted&)>& deliver);

    bool is_idle() const { return waiting_.empty() && num_rows_of_all() == 0; }

    /// From any thread, as of the last iteration: sequences that new requests can use (only the running ones while one waits for
    /// memory), sequences in batches, waiting sequences, and KV entries in use.
    std::int64_t num_rows() const { return num_rows_; }
    std::int64_t num_running() const { return only_ != nullptr ? only_->num_running() : num_running_.load(); }
    std::int64_t num_waiting() const { return only_ != nullptr ? only_->num_waiting() : num_waiting_.load(); }
    std::int64_t num_entries() const { return only_ != nullptr ? only_->num_entries() : num_entries_.load(); }

  private:
    /// A batch of `num_rows` sequences, each of at most `row_bytes` of KV memory.
    struct Lane {
        std::unique_ptr<Schedule> schedule;
        std::int64_t num_rows = 0, row_bytes = 0;

        std::int64_t used() const { return schedule->num_running() + schedule->num_waiting(); }
    };

    void start_rows();
    Lane* lane_for(const Sequence& seq, std::int64_t places);
    Lane* open(std::int64_t num_rows, std::int64_t row_bytes);
    bool is_welcome(const Sequence& seq) const;
    std::int64_t left() const;
    std::int64_t num_rows_of_all() const;
    void publish();

    const KvBudget budget_;
    const std::optional<std::int64_t> max_rows_per_client_;
    const Open open_;
    Queue waiting_;
    std::vector<Lane> lanes_;
    const Schedule* only_ = nullptr;    // without a limit of bytes
    const Sequence* blocked_ = nullptr; // the first sequence that waits for memory
    std::int64_t num_passes_ = 0;

    std::atomic<std::int64_t> num_rows_{0}, num_running_{0}, num_waiting_{0}, num_entries_{0};
};

} // namespace mars
