// Who may compute: so many at once, so many in line behind them, and the rest is told to come back. Knows no requests.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>

class Places {
  public:
    Places(std::size_t at_once, std::size_t in_line, std::chrono::seconds patience) : free_(at_once), line_(in_line), patience_(patience) {}

    /// A place, free again when this goes; false where there was none to be had.
    class Place {
      public:
        explicit Place(Places* from) : from_(from) {}
        Place(const Place&) = delete;
        Place& operator=(const Place&) = delete;
        ~Place() {
            if (from_ != nullptr) from_->give_back();
        }
        explicit operator bool() const { return from_ != nullptr; }

      private:
        Places* from_;
    };

    /// Wait in line for a place, unless the line is full, for as long as `is_wanted` and there is patience.
    Place take(const std::function<bool()>& is_wanted) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (free_ == 0) {
            if (waiting_ == line_) return Place(nullptr);
            ++waiting_;
            const auto deadline = std::chrono::steady_clock::now() + patience_;
            while (free_ == 0 && is_wanted() && std::chrono::steady_clock::now() < deadline)
                changed_.wait_for(lock, std::chrono::milliseconds(50));
            --waiting_;
            if (free_ == 0 || !is_wanted()) return Place(nullptr);
        }
        --free_;
        return Place(this);
    }

  private:
    void give_back() {
        const std::lock_guard<std::mutex> lock(mutex_);
        ++free_;
        changed_.notify_one();
    }

    std::size_t free_, line_, waiting_ = 0;
    std::chrono::seconds patience_;
    std::mutex mutex_;
    std::condition_variable changed_;
};
