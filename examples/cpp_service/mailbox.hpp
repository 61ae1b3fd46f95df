// A queue of events from the batcher's thread to the thread that sends them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <mars/session.hpp>

class Mailbox {
  public:
    /// A callback that puts the events of the answer `index` here. The mailbox lives as long as one of these callbacks.
    static mars::OnEvent slot(const std::shared_ptr<Mailbox>& box, std::size_t index) {
        return [box, index](const mars::Event& event) {
            const std::lock_guard<std::mutex> lock(box->mutex_);
            box->events_.emplace_back(index, event);
            box->changed_.notify_one();
            return false;
        };
    }

    /// The next event and the index of its answer; no value after `patience`.
    std::optional<std::pair<std::size_t, mars::Event>> take(std::chrono::milliseconds patience) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (!changed_.wait_for(lock, patience, [this] { return !events_.empty(); })) return std::nullopt;
        auto next = std::move(events_.front());
        events_.pop_front();
        return next;
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::pair<std::size_t, mars::Event>> events_;
};
