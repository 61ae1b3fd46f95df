// Continuous batching: the decoding loop with rows that join and leave at any step (Schedule in
// runtime/decode/schedule.py).
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

/// Running rows in neighbouring KV rows: first the decoding ones, then those whose prompts are being read, shorter
/// before longer ones.
///
/// Steps are those of decode() in schedule.hpp. At most `prefill_tokens` prompt tokens are read between two of them.
/// `max_rows_per_client`: rows of one client in the batch; no value means no limit. One thread owns a schedule, except
/// where noted.
class ContinuousSchedule {
  public:
    ContinuousSchedule(Backend& backend, std::int64_t block, std::int64_t mask_id, std::int64_t prefill_tokens, KvBudget budget,
                       CostSource cost = nullptr, std::optional<std::int64_t> max_rows_per_client = std::nullopt);

    /// Queue a row. Clients take turns; a client's rows keep their order. While a long prompt is being read, a shorter
    /// one may be admitted first.
    void add(std::shared_ptr<Row> row);

    /// Read prompt pieces within the budget, then run one forward over all decoding rows. Returns what each row got, or
    /// why it failed.
    ///
    /// Rows that were asked to end leave first, without an event.
    std::vector<Accepted> step();

    bool is_idle() const { return waiting_.empty() && batch_->active.empty(); }

    /// From any thread, as of the last step: rows that new requests can use (fewer than the budget's while long ones
    /// fill the KV memory), rows in the batch, waiting rows, and KV entries in use.
    std::int64_t num_rows() const { return num_rows_; }
    std::int64_t num_running() const { return num_running_; }
    std::int64_t num_waiting() const { return num_waiting_; }
    std::int64_t num_entries() const { return num_entries_; }

    /// From any thread: stop the running forward if all its rows were asked to end.
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
    std::unordered_map<const Row*, std::shared_ptr<Row>> own_; // waiting and running rows
    std::unique_ptr<Batch> batch_;
    std::int64_t num_decoding_ = 0;
    std::int64_t turn_ = 0; // which reader is next

    std::atomic<std::int64_t> num_rows_{0}, num_running_{0}, num_waiting_{0}, num_entries_{0};
    std::mutex mutex_;          // guards the members below
    std::vector<Row*> present_; // rows in the batch
    std::weak_ptr<Cache> cache_;
    bool is_interrupted_ = false; // the cache was interrupted; its rows were asked to end
};

} // namespace mars
