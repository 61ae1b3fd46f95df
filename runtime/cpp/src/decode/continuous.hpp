// The decoding loop with rows that join and leave at any step. Twin of Schedule in runtime/decode/schedule.py; knows no text, and of other
// threads only that they end rows.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "decode/batch.hpp"
#include "decode/budget.hpp"
#include "decode/policy.hpp"
#include "decode/queue.hpp"

namespace mars {

/// Rows that run, in neighbouring KV rows: the decoding ones first, then those whose prompts are being read, shorter ones before longer
/// ones. Steps are decode()'s (schedule.hpp); `prefill_tokens` of prompts are read between two of them, at most. `max_rows_per_client`:
/// rows of one client, no value for any number. One thread's, but for what says otherwise.
class ContinuousSchedule {
  public:
    ContinuousSchedule(Backend& backend, std::int64_t block, std::int64_t mask_id, std::int64_t prefill_tokens, KvBudget budget,
                       CostSource cost = nullptr, std::optional<std::int64_t> max_rows_per_client = std::nullopt);

    /// Queue a row. Clients take turns, and the rows of each get theirs in the order in which they were added; only while a long prompt is
    /// being read may a shorter one come before those that wait.
    void add(std::shared_ptr<Row> row);

    /// Prompt pieces within the budget, then one forward over all decoding rows: what each row got, or what made it fail.
    ///
    /// A row that was told to end leaves before anything else happens, without an event.
    std::vector<Accepted> step();

    bool is_idle() const { return waiting_.empty() && batch_->active.empty(); }

    /// Any thread: rows that there are for those who come (fewer than the budget's while long ones fill the KV memory), those that have
    /// a place, those that wait for one, KV entries of the former; a moment old.
    std::int64_t num_rows() const { return num_rows_; }
    std::int64_t num_running() const { return num_running_; }
    std::int64_t num_waiting() const { return num_waiting_; }
    std::int64_t num_entries() const { return num_entries_; }

    /// Any thread: end the forward that runs, where every row of it was told to end.
    void interrupt_unwanted();

  private:
    using Events = std::vector<Accepted>;

    void read_prompts(Events& events);
    void read_forced(Events& events);
    void decode(Events& events);
    void run(const std::vector<Row*>& rows, const std::vector<Feed>& feeds, Events& events);
    Row* reading(Events& events);
    void admit(Events& events);
    bool is_welcome(const Row& row) const;
    bool has_room(Row& row);
    void keep(const Row& row);
    bool is_interrupted();
    void drop_finished(Events& events);
    void move(std::int64_t source, std::int64_t target, Events& events);
    void leave(const Row* row);
    void renew(std::int64_t num_rows);
    void publish();
    std::int64_t next_piece(const Row& row) const;
    std::int64_t num_pieces(const Row& row) const;
    std::vector<Row*> decoding() const;

    Backend& backend_;
    const std::int64_t block_, mask_id_, prefill_tokens_;
    const KvBudget budget_;
    std::optional<Policy> policy_;
    const std::optional<std::int64_t> max_rows_per_client_;
    Queue waiting_;
    std::unordered_map<const Row*, std::shared_ptr<Row>> own_; // those that wait or run
    std::unique_ptr<Batch> batch_;
    std::int64_t num_decoding_ = 0;
    std::int64_t turn_ = 0; // of the prompts that are being read

    std::atomic<std::int64_t> num_rows_{0}, num_running_{0}, num_waiting_{0}, num_entries_{0};
    std::mutex mutex_;          // guards what is below
    std::vector<Row*> present_; // rows of the batch
    std::weak_ptr<Cache> cache_;
    bool is_interrupted_ = false; // its cache runs nothing more; its rows were told to end
};

} // namespace mars
