// What the decoding loop asks of a device: KV rows and one forward. Each backend is one file that implements this.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <mars/errors.hpp>

namespace mars {

constexpr std::int64_t growth = 128; ///< entries: capacity grows in multiples of this

/// The inputs of one forward over some neighbouring rows, row after row.
struct StepInput {
    std::int64_t rows = 0, slots = 0, outputs = 0;
    std::vector<std::int64_t> input_ids;    ///< [rows, slots]
    std::vector<std::int64_t> kv_length;    ///< [rows]
    std::vector<std::int64_t> output_index; ///< [rows, outputs]
    bool want_topk = false;                 ///< the likeliest tokens of each prediction, where the graph has them
};

/// Predictions of one step, all [rows, outputs]; logits [rows, outputs, vocab_size], topk_ids and topk_logprobs [rows, outputs, top_k],
/// best first. What was not asked for or not exported is empty, and `top_k` 0 then.
struct StepOutput {
    std::int64_t outputs = 0, vocab_size = 0, top_k = 0;
    std::vector<std::int64_t> token_ids, topk_ids;
    std::vector<float> confidence, margin, entropy, logits, topk_logprobs;
};

/// A copy of a row's first entries that outlives the cache it is from; only caches of the same backend can read it.
class Saved {
  public:
    explicit Saved(std::int64_t num_entries) : length(num_entries) {}
    virtual ~Saved() = default;
    Saved(const Saved&) = delete;
    Saved& operator=(const Saved&) = delete;

    const std::int64_t length;
};

/// A forward was ended before its time, because nobody wants its outcome any more.
class Interrupted : public DeviceError {
  public:
    using DeviceError::DeviceError;
};

/// KV memory of some rows. Rows are contiguous, so that a step can run on any run of neighbours.
class Cache {
  public:
    virtual ~Cache() = default;

    /// Entries that each row can hold now.
    virtual std::int64_t capacity() const = 0;

    /// Make room for at least `capacity` entries a row, keeping what is there.
    virtual void reserve(std::int64_t capacity) = 0;

    /// Copy the first `length` entries of row `source` over row `target`.
    virtual void move(std::int64_t source, std::int64_t target, std::int64_t length) = 0;

    /// What one entry of one row takes.
    virtual std::int64_t entry_bytes() const = 0;

    /// A copy of the first `length` entries of a row, of nothing behind them.
    virtual std::shared_ptr<const Saved> save(std::int64_t row, std::int64_t length) = 0;

    /// Make the first `length` entries of what was saved those of `row`; all of it has room there.
    virtual void load(std::int64_t row, const Saved& saved, std::int64_t length) = 0;

    /// Any thread: end the forward that runs on these rows with Interrupted, and every later one, where the device can.
    virtual void interrupt() {}
};

/// A variant of a bundle, loaded on a device. One backend may serve several threads, each with a cache of its own.
class Backend {
  public:
    virtual ~Backend() = default;

    /// Names of the prediction outputs of the graph.
    virtual const std::vector<std::string>& outputs() const = 0;

    /// Most slots of one step, nothing for no limit.
    virtual std::optional<std::int64_t> max_slots() const = 0;

    /// Most predictions of each row in one step, nothing for no limit.
    virtual std::optional<std::int64_t> max_outputs() const { return std::nullopt; }

    /// Most entries a row can ever hold.
    virtual std::int64_t max_capacity() const = 0;

    /// Entries that a row's memory ends at: no step may write beyond them, masks included. Without a limit, memory grows.
    virtual std::int64_t max_entries() const { return std::numeric_limits<std::int64_t>::max(); }

    /// From so many slots on, an entry has the same bits whatever step of any row writes it; nothing where they depend on the step's
    /// size: then only equal steps write equal entries.
    virtual std::optional<std::int64_t> firm_slots() const { return std::nullopt; }

    /// Bytes that are free where KV rows are; nothing where unknown.
    virtual std::optional<std::int64_t> free_memory() const { return std::nullopt; }

    virtual std::unique_ptr<Cache> new_cache(std::int64_t num_rows) = 0;

    /// Run one forward on the cache rows first, first + 1, ... and fill `output`.
    ///
    /// Writes KV entries kv_length ... kv_length + slots - 1 of each row; the caller has reserved them. Throws SessionError.
    virtual void step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) = 0;
};

/// The capacity to grow to from `present` when `needed` entries are wanted: at least a quarter more, in steps of `growth`.
std::int64_t bucket(std::int64_t needed, std::int64_t present);

} // namespace mars
