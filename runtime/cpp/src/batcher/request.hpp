// runtime/batcher/request.py: one request to a batcher, as its holder and its batcher see it.
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
#include <unistd.h>

#include <mars/batcher.hpp>

#include "session/answers.hpp"

namespace mars {

/// Shared by a batcher and the holder of a request. The sequence and its text belong to the batcher's thread, except for the
/// sequence's thread-safe members.
struct RequestState {
    using Clock = std::chrono::steady_clock;
    using End = std::function<void(std::int64_t, FinishReason)>;

    /// `how` ends a request by its number; `until` is its deadline, if it has one.
    RequestState(std::shared_ptr<const Opened> opened, NewSequence made, End how, std::optional<Clock::time_point> until,
                 std::optional<std::string> of, OnEvent callback);

    const std::shared_ptr<const Opened> session; // first, because the sequence refers to it
    const std::unique_ptr<TextStream> text;
    const std::unique_ptr<Sequence> seq;
    const std::optional<std::string> client;

    // --- for readers, in any thread ---

    std::optional<Event> next();
    Completion result(std::optional<double> timeout);
    Completion completion() const { return locked(seen_); }
    std::optional<FinishReason> finish_reason() const { return locked(reason_); }
    bool failed() const { return locked(error_) != nullptr; }
    void cancel() const { end_(seq->index, FinishReason::cancelled); }

    /// The holder is gone: cancel, and call no callback from now on.
    void abandon() noexcept;

    // --- for its batcher ---

    /// Whether its deadline has passed.
    bool is_overdue() const { return until_ && Clock::now() >= *until_; }

    /// Add what a step gave. Called in the batcher's thread only, because the text grows here.
    void deliver(const Accepted& accepted);

    /// Pass pending events to the callback, if there is one. Throws what it throws.
    void call();

    /// Why it ended, if a delivered step ended it.
    std::optional<FinishReason> last_reason() const { return locked(last_); }

    /// End the request, wake its readers and return the final completion. Called once, from any thread.
    const Completion& conclude(FinishReason reason, std::exception_ptr error) noexcept;

  private:
    bool wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& is_enough, Clock::time_point last);
    bool is_over() const { return reason_.has_value(); }

    template <typename Member>
    Member locked(const Member& member) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return member;
    }

    bool has_event() const { return !events_.empty() || (is_over() && !is_told_); }
    std::optional<Event> take();

    const pid_t process_ = ::getpid(); // whose batcher answers it
    const End end_;
    const std::optional<Clock::time_point> until_;
    const OnEvent callback_;

    std::recursive_mutex calling_; // guards callback calls: one at a time, in the order of events
    bool is_abandoned_ = false;

    mutable std::mutex mutex_; // guards the members below; never held while a step or a callback runs
    std::condition_variable changed_;
    std::deque<Event> events_;
    Completion seen_;       // everything its events contained
    std::size_t shown_ = 0; // bytes of the text already in events
    std::optional<FinishReason> last_, reason_;
    bool is_told_ = false; // whether readers have seen the last event, or an error
    std::exception_ptr error_;
};

} // namespace mars
