// Continuous batching: requests of many threads as rows of one batch.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <mars/config.hpp>
#include <mars/errors.hpp>
#include <mars/export.hpp>
#include <mars/session.hpp>
#include <mars/stats.hpp>

namespace mars {

/// Limits on running work and on single requests; no value means no limit.
struct MARS_API Limits {
    std::optional<std::int64_t> max_rows;                          ///< sequences that run at once; 8, or fewer if an engine has fewer
    std::int64_t max_waiting = 64;                                 ///< requests that may wait, not counting the next ones for free rows
    std::int64_t prefill_tokens = 128;                             ///< prompt tokens that are read between two decode steps, at most
    std::optional<std::int64_t> max_prompt_tokens, max_new_tokens; ///< longest prompt and answer
    std::optional<std::int64_t> max_stops;                         ///< most stop strings, and most eos_ids
    std::optional<std::int64_t> kv_bytes; ///< KV memory of all requests; at most 4 x max_rows requests pass one that waits for it
    double client_share = 1.0;            ///< share of all places (rows and waiting) that one client may have; above 0, at most 1
    std::optional<std::int64_t>
        max_rows_per_client; ///< sequences of one client in one forward; its other requests wait, even if rows are free
    std::int64_t cache_block =
        1; ///< with a tau, tokens whose KV entries become final together: 1 is cursor commit, more the paper's block commit

    /// Throws SessionError that lists every invalid value.
    void check() const;

    /// Throws SessionError if `config` exceeds these limits.
    void check(const GenerationConfig& config) const;

    /// `max_rows`, or its default of 8.
    std::int64_t rows() const;
};

/// Counts since a batcher was created.
///
/// accepted: got a place; each of them ends as finished, failed (with an error), cancelled or expired (its deadline
/// passed). Not accepted: refused (the request is invalid, or the batcher is closed) and overloaded (no room).
/// prompt_tokens and tokens: of accepted requests that have ended.
struct Counts {
    std::int64_t accepted = 0, finished = 0, failed = 0, cancelled = 0, expired = 0, refused = 0, overloaded = 0, prompt_tokens = 0,
                 tokens = 0;
};

struct RequestState;

/// A submitted prompt: its events, the answer so far, and how it ended. Thread-safe; destroying it ends the answer.
class MARS_API Request {
  public:
    ~Request();
    Request(Request&&) noexcept = default;
    Request& operator=(Request&&) noexcept;

    /// Wait for the next event; no value after the last one. Throws what made the request fail, and SessionError if a
    /// callback receives the events.
    std::optional<Event> next();

    /// Wait for the whole answer. Throws what made the request fail, or SessionError after `timeout` seconds; the
    /// request then continues.
    Completion result(std::optional<double> timeout = std::nullopt);

    /// End the answer; its row is free before the next step, and a step of this row alone ends. Has no effect after the end.
    void cancel();

    /// The answer so far, as in its events; `finish_reason` is cancelled until it is finished. Never waits for a step.
    Completion completion() const;

    /// No value while it runs.
    std::optional<FinishReason> finish_reason() const;

    /// Whether it ended because a step or its callback failed.
    bool failed() const;

    /// tau; no value in exact mode. A new value applies from the next step on and ends exact mode. Throws SessionError
    /// if it is out of range.
    std::optional<double> tau() const;
    void set_tau(double tau);

    /// Exact mode, which may change at any time. Leaving it sets default_tau.
    bool exact() const { return !tau(); }
    void set_exact(bool exact);

  private:
    friend class Batcher;
    explicit Request(std::shared_ptr<RequestState> answer);

    std::shared_ptr<RequestState> answer_;
};

/// Continuous batching over one session: requests join and leave at any step, each with its own settings.
///
/// Thread-safe. A failure in one request ends that request. A failure of the batcher itself ends all requests, and
/// `submit` then throws.
class MARS_API Batcher {
  public:
    /// Allocates KV memory as rows need it. Throws SessionError for invalid limits.
    explicit Batcher(Session session, const Limits& limits = {});

    ~Batcher();
    Batcher(const Batcher&) = delete;
    Batcher& operator=(const Batcher&) = delete;

    /// How a request is queued. `wait`: seconds to wait for room; no value: until its deadline. `client`: the client that
    /// it counts for, in turns and in the share of places; requests without one take turns as one client without a share.
    /// `on_event` receives each event instead of `next`, usually in the batcher's thread between two steps, so every
    /// row waits for it. An exception it throws ends its request.
    struct Entry {
        std::optional<double> wait = 0.0;
        std::optional<std::string> client = std::nullopt;
        OnEvent on_event = nullptr;
    };

    /// Queue a prompt; returns once it is tokenized. `config.deadline` counts from here, waiting included. Throws
    /// Overloaded if there is no room, and SessionError for a prompt or config that cannot be served and if the batcher
    /// is closed or has failed.
    Request submit(const Prompt& prompt, const GenerationConfig& config, const Entry& entry);
    Request submit(const Prompt& prompt, const GenerationConfig& config = {}) { return submit(prompt, config, Entry()); }

    /// Whether it takes requests: not closed, not failed.
    bool alive() const;

    Counts counts() const;

    /// Requests with a row, and requests that wait for one or are being tokenized.
    std::int64_t num_running() const;
    std::int64_t num_waiting() const;

    /// The share of KV memory that running rows use: of `Limits::kv_bytes`, or of what `max_rows` full rows need.
    double kv_usage() const;

    /// How long the current step has been running, 0 between steps: shows a step that hangs.
    double step_seconds() const;

    /// Take no more requests, give the present ones `drain` seconds to finish, then cancel the rest and end the thread.
    ///
    /// Cancelled requests keep their text; their last event says cancelled. Waits for the current step, at most
    /// `timeout` seconds (no value: as long as it takes); returns false if it still hangs.
    bool close(double drain = 0.0, std::optional<double> timeout = 10.0);

    /// Its limits, with the actual number of rows.
    const Limits& limits() const;

    struct Service;

  private:
    std::shared_ptr<Service> service_;
};

} // namespace mars
