// What a request cost. Values that are returned, never printed.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>

#include <mars/export.hpp>

namespace mars {

/// Counts and times of one row.
///
/// forwards: steps this row took part in, from the last prefill chunk on, block-commit forwards included; the prefill
/// chunks before that are prefill_forwards. accepted[k]: steps that accepted k tokens. Times in seconds, measured from the
/// start of the call, which `began` before its text became tokens; decode_time is the row's time after its first token.
struct MARS_API Stats {
    std::int64_t prompt_tokens = 0;
    std::int64_t tokens = 0;
    std::int64_t forwards = 0;
    std::int64_t prefill_forwards = 0;
    double prefill_time = 0.0;
    double decode_time = 0.0;
    double time_to_first_token = 0.0;
    std::int64_t tokens_after_first = 0;
    std::map<std::int64_t, std::int64_t> accepted;
    std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now(), prefill_began = began;

    double tokens_per_forward() const { return forwards > 0 ? static_cast<double>(tokens) / static_cast<double>(forwards) : 0.0; }

    /// Decode speed: tokens after the first step, over the time after it.
    double tokens_per_second() const { return decode_time > 0 ? static_cast<double>(tokens_after_first) / decode_time : 0.0; }

    /// Note one step that accepted `num_accepted` tokens.
    void count(std::int64_t num_accepted) {
        ++accepted[num_accepted];
        if (tokens > 0) tokens_after_first += num_accepted;
        tokens += num_accepted;
        const double elapsed = since(began);
        if (time_to_first_token == 0) time_to_first_token = elapsed;
        decode_time = elapsed - time_to_first_token;
    }

    void begin_prefill() { prefill_began = std::chrono::steady_clock::now(); }
    void end_prefill() { prefill_time = since(prefill_began); }

  private:
    static double since(std::chrono::steady_clock::time_point moment) {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - moment).count();
    }
};

} // namespace mars
