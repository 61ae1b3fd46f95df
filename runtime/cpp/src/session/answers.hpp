// runtime/session/answer.py: sequences with their texts, and the loop that decodes them.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <mars/session.hpp>

#include "decode/schedule.hpp"
#include "session/opened.hpp"

namespace mars {

constexpr double forever = 1e9; // seconds

/// Seconds given by a caller as a duration, clamped to 0 ... forever. Throws SessionError for NaN; `name` is the parameter's
/// name in the message.
std::chrono::steady_clock::duration duration_of(double seconds, const char* name);

/// The event of what a step accepted, with its text from the sequence's own stream, if there is one.
Event event_of(const Accepted& accepted, TextStream* text);

struct Answers {
    Answers(std::shared_ptr<const Opened> session, const std::vector<Prompt>& prompts, const std::vector<GenerationConfig>& configs,
            std::int64_t cache_block, const std::optional<std::string>& system = std::nullopt);

    /// The next step's events, none for a prefill piece; no value when all sequences are done.
    std::optional<std::vector<Event>> next();

    void cancel(std::int64_t seq) { answers_[static_cast<std::size_t>(seq)].seq->cancel(); }
    bool failed() const { return failed_; }
    Sequence& seq(std::size_t i) { return *answers_[i].seq; }
    const Sequence& seq(std::size_t i) const { return *answers_[i].seq; }
    Completion completion(std::size_t i) const;
    std::vector<Completion> completions() const;

  private:
    using Clock = std::chrono::steady_clock;
    struct Answer {
        std::unique_ptr<TextStream> text;
        std::unique_ptr<Sequence> seq;
        std::optional<Clock::time_point> until; // its deadline
        std::vector<double> confidences;
    };

    std::shared_ptr<const Opened> session_;
    std::vector<Answer> answers_;
    std::optional<Run> run_;
    bool failed_ = false;
};

} // namespace mars
