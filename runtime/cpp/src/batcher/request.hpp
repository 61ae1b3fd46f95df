// One request to a batcher, as its readers and its batcher see it. Runs nothing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <mars/batcher.hpp>

#include "session/answers.hpp"

namespace mars {

/// What a batcher and the holder of a request share. The row and its text belong to the batcher's thread, but for what any thread may say
/// to a row.
struct RequestState {
    using Clock = std::chrono::steady_clock;
    using End = std::function<void(std::int64_t, FinishReason)>;

    /// `end`: what its batcher does to end it, by its number. `until`: its deadline, if it has one.
    RequestState(std::shared_ptr<const Opened> opened, NewRow made, End how, std::optional<Clock::time_point> until,
                 std::optional<std::string> of, OnEvent callback);

    const std::shared_ptr<const Opened> session; // first: what the row refers to
    const std::unique_ptr<TextStream> text;
    const std::unique_ptr<Row> row;
    const std::optional<std::string> client;

    // --- for readers, in any thread ---

    std::optional<Event> next();
    Completion result(std::optional<double> timeout);
    Completion completion() const;
    std::optional<FinishReason> finish_reason() const;
    bool failed() const;
    void cancel() const { end_(row->index, FinishReason::cancelled); }

    /// Nobody holds it any more: no callback is called from now on.
    void abandon() noexcept;

    // --- for its batcher ---

    /// Whether its deadline has come.
    bool is_overdue() const { return until_ && Clock::now() >= *until_; }

    /// Take in what a step gave. In the batcher's thread only: the text grows here.
    void deliver(const Accepted& accepted);

    /// Hand what is there to the callback, if there is one. Throws what that throws.
    void call();

    /// Why it ended, if a step that was delivered ended it.
    std::optional<FinishReason> last_reason() const;

    /// It is over, its readers are told; what it came to, which is final. Once, in any thread.
    const Completion& conclude(FinishReason reason, std::exception_ptr error) noexcept;

  private:
    bool wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& is_enough, std::optional<Clock::time_point> last);
    bool is_over() const { return reason_.has_value(); }
    bool has_event() const { return !events_.empty() || (is_over() && !is_told_); }
    std::optional<Event> take();

    const End end_;
    const std::optional<Clock::time_point> until_;
    const OnEvent callback_;

    std::recursive_mutex calling_; // guards calls of the callback: one at a time, in the order of events
    bool is_abandoned_ = false;

    mutable std::mutex mutex_; // guards what is below; never held while a step or a callback runs
    std::condition_variable changed_;
    std::deque<Event> events_;
    Completion seen_;       // all that its events have
    std::size_t shown_ = 0; // bytes of the text that they have
    std::optional<FinishReason> last_, reason_;
    bool is_told_ = false; // readers have an event that says why it ended, or an error
    std::exception_ptr error_;
};

} // namespace mars
