// runtime/decode/backend.py: the interface between the decoding loop and a device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace mars {

constexpr std::int64_t growth = 128; ///< entries: capacities are multiples of this

/// What one sequence feeds into a step, from its cursor on: `pending` tokens, `draft_tokens`, `masks`.
///
/// The outputs are those of the last pending token, of every draft token and of every mask, in this order.
struct StepPlan {
    std::int64_t pending = 0, draft_tokens = 0, masks = 0;

    std::int64_t slots() const { return pending + draft_tokens + masks; }
    std::int64_t outputs() const { return 1 + draft_tokens + masks; }
};

/// Ends a running step as soon as all of its sequences have been ended. Thread-safe.
class Interrupt {
  public:
    explicit Interrupt(std::int64_t num_seqs) : num_wanted_(num_seqs) {}

    /// One of the sequences was ended by another thread.
    void drop() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (--num_wanted_ == 0 && stop_) stop_();
    }

    /// What stops the step; null when it is over.
    void set_stop(std::function<void()> stop) {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = std::move(stop);
        if (num_wanted_ == 0 && stop_) stop_();
    }

    bool is_due() const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return num_wanted_ == 0;
    }

  private:
    mutable std::mutex mutex_;
    std::int64_t num_wanted_;
    std::function<void()> stop_;
};

/// A step ended by its Interrupt: what it wrote is void, and its sequences are over.
struct Interrupted : std::exception {};

/// The inputs of one forward over neighbouring rows, row after row.
struct StepInput {
    std::int64_t rows = 0, slots = 0, outputs = 0;
    std::vector<std::int64_t> input_ids;            ///< [rows, slots]
    std::vector<std::int64_t> kv_length;            ///< [rows]
    std::vector<std::int64_t> output_index;         ///< [rows, outputs]
    bool want_topk = false;                         ///< also return the likeliest tokens of each prediction, if the graph has them
    std::shared_ptr<Interrupt> interrupt = nullptr; ///< for a backend that can end a running step; null: it runs to its end
};

/// Predictions of one step, all [rows, outputs]; logits [rows, outputs, vocab_size]; topk_ids and topk_logprobs [rows,
/// outputs, top_k], best first. What was not requested or not exported is empty; `top_k` is then 0. The last `mtp_drafts`
/// outputs belong to no slot: they are the MTP layer's predictions of the tokens after the last one that greedy decoding
/// accepts. `is_prepared` is false if the step first prepared its shape, so that its time says nothing about later ones.
struct StepOutput {
    std::int64_t outputs = 0, vocab_size = 0, top_k = 0, mtp_drafts = 0;
    bool is_prepared = true;
    std::vector<std::int64_t> token_ids, topk_ids;
    std::vector<float> confidence, margin, entropy, logits, topk_logprobs;
};

/// A copy of a row's first entries that outlives the cache it was made from. Only caches of the same backend can load
/// it.
class Saved {
  public:
    explicit Saved(std::int64_t num_entries) : length(num_entries) {}
    virtual ~Saved() = default;
    Saved(const Saved&) = delete;
    Saved& operator=(const Saved&) = delete;

    const std::int64_t length;
};

/// KV memory of several rows. Rows are contiguous, so a step can run on any neighbouring ones.
class Cache {
  public:
    virtual ~Cache() = default;
    virtual std::int64_t capacity() const = 0;

    /// Grow to at least `capacity` entries a row. The first `lengths[i]` entries of row i are kept, and none of the other rows.
    virtual void reserve(std::int64_t capacity, const std::vector<std::int64_t>& lengths = {}) = 0;

    /// Reduce the room to about `capacity` entries a row, keeping the same entries as `reserve`; memory of a fixed size stays.
    virtual void shrink(std::int64_t /*capacity*/, const std::vector<std::int64_t>& /*lengths*/) {}

    /// Zero a row's entries, and free their memory where the host can.
    virtual void release(std::int64_t row) = 0;

    /// Copy the first `length` entries of row `source` over row `target`.
    virtual void move(std::int64_t source, std::int64_t target, std::int64_t length) = 0;
    virtual std::int64_t entry_bytes() const = 0;

    /// Size of a copy of the first `length` entries of a row; no value if the row's recurrent states are beyond them.
    virtual std::optional<std::int64_t> copy_bytes(std::int64_t /*row*/, std::int64_t length) const { return length * entry_bytes(); }
    virtual std::shared_ptr<const Saved> save(std::int64_t row, std::int64_t length) = 0;

    /// Load the first `length` saved entries into `row`, which has room for all saved ones. With recurrent states, these are all.
    virtual void load(std::int64_t row, const Saved& saved, std::int64_t length) = 0;
};

/// A variant of a bundle, loaded on a device. Several threads may share a backend, each with its own cache.
class Backend {
  public:
    virtual ~Backend() = default;
    virtual const std::vector<std::string>& outputs() const = 0;

    /// Maximum number of slots of one step; no value means no limit.
    virtual std::optional<std::int64_t> max_slots() const = 0;

    /// Most predictions of one row in one step; no value means no limit.
    virtual std::optional<std::int64_t> max_outputs() const { return std::nullopt; }

    /// Most entries that a row can ever hold.
    virtual std::int64_t max_capacity() const = 0;

    /// End of a row's memory: no step may write beyond it, masks included. Memory without a fixed size grows.
    virtual std::int64_t max_entries() const { return std::numeric_limits<std::int64_t>::max(); }

    /// From this many slots on, a KV entry has the same bits whichever step of whichever row wrote it. No value:
    /// entries depend on the size of the step, so only equal steps write equal entries.
    virtual std::optional<std::int64_t> reproducible_slots() const { return std::nullopt; }

    /// Free bytes where KV rows are stored; no value if unknown.
    virtual std::optional<std::int64_t> free_memory() const { return std::nullopt; }

    virtual std::unique_ptr<Cache> new_cache(std::int64_t num_rows) = 0;

    /// Run one forward on the cache rows first, first + 1, ... and fill `output`.
    ///
    /// Writes KV entries kv_length ... kv_length + slots - 1 of each row, which the caller has reserved. Throws
    /// SessionError, and Interrupted.
    virtual void step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) = 0;
};

/// The capacity to grow to from `present` for `needed` entries: at least a quarter more, rounded up to `growth`.
inline std::int64_t bucket(std::int64_t needed, std::int64_t present) {
    const std::int64_t target = std::max(needed, present + present / 4);
    return (target + growth - 1) / growth * growth;
}

} // namespace mars
