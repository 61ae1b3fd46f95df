// The shared part of streams and batches: rows, their texts, and the loop that decodes them.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <mars/session.hpp>

#include "decode/schedule.hpp"
#include "session/alarm.hpp"
#include "session/opened.hpp"

namespace mars {

struct Answers {
    Answers(std::shared_ptr<const Opened> session, const std::vector<Prompt>& prompts, const std::vector<GenerationConfig>& configs,
            const Commit& commit, const std::optional<std::string>& system = std::nullopt);

    /// The next step's events, none for a prefill piece; no value when all rows are done.
    std::optional<std::vector<Event>> next();

    void cancel(std::int64_t row);
    bool failed() const { return failed_; }
    Row& row(std::size_t i) { return *answers_[i].row; }
    const Row& row(std::size_t i) const { return *answers_[i].row; }
    Completion completion(std::size_t i) const;
    std::vector<Completion> completions() const;

  private:
    struct Answer {
        std::unique_ptr<TextStream> text;
        std::unique_ptr<Row> row;
        std::vector<double> confidences;
    };

    Event event(Accepted accepted);
    void interrupt() const;
    void watch(std::chrono::steady_clock::time_point began);

    std::shared_ptr<const Opened> session_;
    std::vector<Answer> answers_;
    std::unique_ptr<Run> run_;
    std::weak_ptr<Cache> running_; // memory that the forwards use
    bool failed_ = false;
    std::vector<std::unique_ptr<Alarm>> alarms_; // last member, so that timers stop before anything else is destroyed
};

} // namespace mars
