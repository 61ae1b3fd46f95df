// How a request ended, and its statistics.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string_view>

#include <mars/export.hpp>

namespace mars {

/// Why an answer ended.
enum class FinishReason { eos, stop, length, capacity, cancelled, deadline };

/// The reason's name in JSON and on the command line.
MARS_API std::string_view to_string(FinishReason reason);

/// Counts and times of one row.
///
/// cached_tokens: prompt tokens from the prefix cache. forwards: steps of this row from the last prefill piece on;
/// earlier prefill pieces are prefill_forwards. accepted[k]: steps that accepted k tokens. draft_tokens: tokens fed as draft tokens; accepted_draft_tokens: those accepted. forced: tokens that a grammar forced; they
/// count in `tokens`, not in `accepted`. Times are seconds from `began`, before tokenization: queue_time until the
/// first forward, prefill_time from there to the first token, time_to_first_token both together, decode_time after it.
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
    std::int64_t draft_tokens = 0;
    std::int64_t accepted_draft_tokens = 0;
    std::int64_t forced = 0;
    std::map<std::int64_t, std::int64_t> accepted;
    std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();

    /// Draft tokens that were not verified.
    std::int64_t rejected_draft_tokens() const { return draft_tokens - accepted_draft_tokens; }

    /// Tokens a step; 0 before the first step.
    double tokens_per_forward() const { return forwards > 0 ? static_cast<double>(tokens) / static_cast<double>(forwards) : 0.0; }

    /// Decode speed: tokens after the first step, divided by the seconds after it; 0 until then.
    double tokens_per_second() const { return decode_time > 0 ? static_cast<double>(tokens_after_first) / decode_time : 0.0; }

    /// Called before each forward of the row; only the first counts.
    void starts() {
        if (forwards == 0 && prefill_forwards == 0) queue_time = elapsed();
    }

    /// Record a step with `num_accepted` tokens of the model and `num_forced` tokens that a grammar forces.
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

/// Statistics of a session's prefix cache.
///
/// queries: prompts looked up; hits: prompts with a cached beginning. query_tokens: tokens of all these prompts;
/// hit_tokens: the cached ones. saved, evicted: entries added, and removed to make room; failed: entries that
/// could not be copied. entries, num_bytes: current contents.
struct PrefixStats {
    std::int64_t queries = 0, hits = 0, query_tokens = 0, hit_tokens = 0, saved = 0, evicted = 0, failed = 0, entries = 0, num_bytes = 0;
};

} // namespace mars
