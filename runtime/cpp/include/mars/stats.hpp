// How a request ended and what it cost. Values that are returned, never printed.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string_view>

#include <mars/export.hpp>

namespace mars {

/// Why an answer ended.
enum class FinishReason { eos, stop, length, capacity, cancelled, deadline };

MARS_API std::string_view to_string(FinishReason reason);

/// Counts and times of one row.
///
/// cached_tokens: prompt tokens whose KV entries were there before. forwards: steps this row took part in, from the last prefill chunk
/// on, block-commit forwards included; the prefill chunks before that are prefill_forwards. accepted[k]: steps that gave k tokens.
/// proposed: tokens that were fed to be verified; verified: those that held. forced: tokens that a grammar gave; they are in `tokens`, not
/// in `accepted`. Times in seconds from `began`, before the prompt became tokens: queue_time until the row's first forward,
/// prefill_time from there to its first token, time_to_first_token both together, decode_time after it.
struct Stats {
    std::int64_t prompt_tokens = 0;
    std::int64_t cached_tokens = 0;
    std::int64_t tokens = 0;
    std::int64_t forwards = 0;
    std::int64_t prefill_forwards = 0;
    double queue_time = 0.0;
    double prefill_time = 0.0;
    double decode_time = 0.0;
    double time_to_first_token = 0.0;
    std::int64_t tokens_after_first = 0;
    std::int64_t proposed = 0;
    std::int64_t verified = 0;
    std::int64_t forced = 0;
    std::map<std::int64_t, std::int64_t> accepted;
    std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();

    /// Proposals that did not hold, or stood behind one that did not.
    std::int64_t rejected() const { return proposed - verified; }

    double tokens_per_forward() const { return forwards > 0 ? static_cast<double>(tokens) / static_cast<double>(forwards) : 0.0; }

    /// Decode speed: tokens after the first step, over the time after it.
    double tokens_per_second() const { return decode_time > 0 ? static_cast<double>(tokens_after_first) / decode_time : 0.0; }

    /// The row is about to take part in a forward; only the first counts.
    void starts() {
        if (forwards == 0 && prefill_forwards == 0) queue_time = elapsed();
    }

    /// Note one step that gave `num_accepted` tokens of the model, and `num_forced` ones that a grammar forces.
    void count(std::int64_t num_accepted, std::int64_t num_forced = 0) {
        if (accepted.empty()) {
            time_to_first_token = elapsed();
            prefill_time = time_to_first_token - queue_time;
        } else {
            tokens_after_first += num_accepted + num_forced;
            decode_time = elapsed() - time_to_first_token;
        }
        ++accepted[num_accepted];
        tokens += num_accepted + num_forced;
        forced += num_forced;
    }

  private:
    double elapsed() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count(); }
};

/// The store of KV entries of one session.
///
/// queries: prompts that were looked up; hits: those of which something was there. query_tokens: of all these prompts; hit_tokens: those of
/// them that were there. saved, evicted: entries that came, and that went because memory was short; failed: those that could not be
/// copied. entries, num_bytes: what is there now.
struct PrefixStats {
    std::int64_t queries = 0, hits = 0, query_tokens = 0, hit_tokens = 0, saved = 0, evicted = 0, failed = 0, entries = 0, num_bytes = 0;
};

} // namespace mars
