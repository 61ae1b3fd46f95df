// A service over one session: submit from any thread, stream, cancel. Twin of Python's Batcher; owns the thread that steps a schedule.
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

/// How much runs at once, and how much one request may ask for; no value is no limit.
struct MARS_API Limits {
    std::optional<std::int64_t>
        max_rows;                  ///< sequences in one forward, each with KV memory for the longest; 8, or fewer if an engine has fewer
    std::int64_t max_waiting = 64; ///< requests that may wait, beside those that free rows are about to take
    std::int64_t prefill_tokens = 128;                             ///< prompt tokens that are read between two decode steps, at most
    std::optional<std::int64_t> max_prompt_tokens, max_new_tokens; ///< longest prompt and answer
    std::optional<std::int64_t> max_stops;                         ///< stop strings, and eos_ids
    std::optional<std::int64_t> kv_bytes; ///< KV memory of the whole batch; a long request waits until fewer rows, at least its own, fit in
    double client_share = 1.0;            ///< of all places, rows and waiting ones, what one client may have, above 0, at most 1
    std::optional<std::int64_t> max_rows_per_client; ///< sequences of one client in one forward; its others wait, also where rows are free

    /// Throws SessionError that lists every value that cannot be.
    void check() const;

    /// Throws SessionError when `config` asks for more than is given here.
    void check(const GenerationConfig& config) const;

    /// Sequences in one forward.
    std::int64_t rows() const;

    /// Requests that one client may have here.
    std::int64_t max_of_client() const;
};

/// Requests since a batcher was made.
///
/// accepted: given a place; each of them ends as one of finished, failed (with an error), cancelled, expired (its deadline came). Not
/// accepted: refused, for what is wrong with the request or because the batcher is closed, and overloaded, for want of room. prompt_tokens
/// and tokens: of accepted ones that have ended.
struct Counts {
    std::int64_t accepted = 0, finished = 0, failed = 0, cancelled = 0, expired = 0, refused = 0, overloaded = 0, prompt_tokens = 0,
                 tokens = 0;

    std::int64_t ended() const { return finished + failed + cancelled + expired; }
};

struct RequestState;

/// One submitted prompt: its events, the answer so far, how it ended. Any thread may use it; leaving it ends the answer.
class MARS_API Request {
  public:
    ~Request();
    Request(Request&&) noexcept;
    Request& operator=(Request&&) noexcept;

    /// Wait for the next event; no value after the last one. Throws what made the request fail, and SessionError where a callback has the
    /// events.
    std::optional<Event> next();

    /// Wait for the whole answer. Throws what made the request fail, or SessionError after `timeout` seconds, when it goes on.
    Completion result(std::optional<double> timeout = std::nullopt);

    /// End the answer; its row is free before the next step. Does nothing to one that has ended.
    void cancel();

    /// The answer so far, which is all that its events have; `finish_reason` is cancelled while it is not finished. Never waits for a step.
    Completion completion() const;

    /// No value while it runs.
    std::optional<FinishReason> finish_reason() const;

    /// Whether a step or its callback failed and ended it.
    bool failed() const;

    /// The confidence bound, no value in exact mode. A new one counts from the next step on and ends exact mode. Throws SessionError for
    /// one out of range.
    std::optional<double> tau() const;
    void set_tau(double tau);

    /// Exact mode, at any time. Leaving it takes default_tau.
    bool exact() const { return !tau(); }
    void set_exact(bool exact);

    /// Counts the requests of a batcher.
    std::int64_t number() const;

  private:
    friend class Batcher;
    explicit Request(std::shared_ptr<RequestState> answer);

    std::shared_ptr<RequestState> answer_;
};

/// Continuous batching over one session: requests join and leave at any step, each with its own settings.
///
/// Any number of threads may use it, in the process that made it. What fails in one request ends that request; what fails in the batcher
/// itself ends all, and `submit` says so from then on.
class MARS_API Batcher {
  public:
    /// Takes KV memory as rows need it. Throws SessionError for limits that cannot be. What a step costs is measured first (about a second,
    /// unless an earlier session of this user wrote it down).
    explicit Batcher(Session session, const Limits& limits = {});

    /// Closes.
    ~Batcher();
    Batcher(const Batcher&) = delete;
    Batcher& operator=(const Batcher&) = delete;

    /// How a request comes in. `wait`: seconds to wait for room, no value for any time until its deadline. `client`: whose turn it
    /// takes and whose share of the places; nobody's take turns with the others as one client, and have no share that ends. `on_event`:
    /// sees each event instead of `next`, mostly in the batcher's thread, between two steps: every row waits for it. What it throws ends
    /// its request.
    struct Entry {
        std::optional<double> wait = 0.0;
        std::optional<std::string> client = std::nullopt;
        OnEvent on_event = nullptr;
    };

    /// Queue a prompt; returns once it is tokenized. `config.deadline` counts from here, whether it waits or runs. Throws Overloaded when
    /// there is no room, SessionError for a prompt or config that cannot be served and for a batcher that is closed or has failed.
    Request submit(const Prompt& prompt, const GenerationConfig& config, const Entry& entry);
    Request submit(const Prompt& prompt, const GenerationConfig& config = {}) { return submit(prompt, config, Entry()); }

    /// Whether it takes requests: not closed, not failed.
    bool alive() const;

    /// What was done so far.
    Counts counts() const;

    /// Requests that have a row, and those that wait for one or are being tokenized.
    std::int64_t num_running() const;
    std::int64_t num_waiting() const;

    /// What running rows fill of its KV memory: of `Limits::kv_bytes`, or of what `max_rows` rows take.
    double kv_usage() const;

    /// How long the step in hand has been running, 0 between steps: a step that hangs shows here.
    double step_seconds() const;

    /// Take no more requests, give those that are here `drain` seconds to finish, then cancel what is left and end the thread.
    ///
    /// Cancelled requests keep what they have; their last event says cancelled. Waits for the step in hand, at most `timeout` seconds (no
    /// value: as long as it takes): false says that it still hangs.
    bool close(double drain = 0.0, std::optional<double> timeout = 10.0);

    const Session& session() const;
    /// With the number of rows it has.
    const Limits& limits() const;

    struct Service;

  private:
    std::shared_ptr<Service> service_;
};

} // namespace mars
