// TensorRT's log: forwarded, and recent errors kept for messages.
#pragma once

#include <NvInfer.h>
#include <algorithm>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "joined.hpp"
#include "log.hpp"

namespace mars {

/// TensorRT calls it from any thread.
class Collected : public nvinfer1::ILogger {
  public:
    explicit Collected(OnLog on_log = nullptr) : on_log_(std::move(on_log)) {}

    void log(Severity severity, const char* message) noexcept override {
        const bool is_error = severity == Severity::kERROR || severity == Severity::kINTERNAL_ERROR;
        if (severity == Severity::kVERBOSE) return;
        note(on_log_, is_error ? LogLevel::error : severity == Severity::kWARNING ? LogLevel::warning : LogLevel::info, message);
        if (!is_error) return;
        const std::lock_guard<std::mutex> lock(mutex_);
        errors_.emplace_back(message);
        if (errors_.size() > most) errors_.pop_front();
    }

    /// The latest `count` errors, one a line.
    std::string last(std::size_t count) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        const std::vector<std::string> latest(errors_.end() - static_cast<std::ptrdiff_t>(std::min(count, errors_.size())), errors_.end());
        return latest.empty() ? "it gave no reason" : joined(latest, "\n  ");
    }

  private:
    static constexpr std::size_t most = 20;

    const OnLog on_log_;
    mutable std::mutex mutex_;
    std::deque<std::string> errors_;
};

} // namespace mars
