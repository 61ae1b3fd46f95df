// A timer that can be cancelled.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace mars {

/// Calls `ring` at `when` in its own thread, unless destroyed before.
class Alarm {
  public:
    Alarm(std::chrono::steady_clock::time_point when, std::function<void()> ring)
        : thread_([this, when, ring = std::move(ring)] {
              std::unique_lock<std::mutex> lock(mutex_);
              if (!over_.wait_until(lock, when, [this] { return is_off_; })) ring();
          }) {}
    Alarm(const Alarm&) = delete;
    Alarm& operator=(const Alarm&) = delete;

    ~Alarm() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            is_off_ = true;
        }
        over_.notify_all();
        thread_.join();
    }

  private:
    std::mutex mutex_;
    std::condition_variable over_;
    bool is_off_ = false;
    std::thread thread_;
};

} // namespace mars
