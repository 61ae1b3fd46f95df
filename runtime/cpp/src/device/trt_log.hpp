// What TensorRT complains about, kept instead of printed.
#pragma once

#include <NvInfer.h>
#include <algorithm>
#include <deque>
#include <mutex>
#include <string>

namespace mars {

/// TensorRT calls it from any thread.
class Collected : public nvinfer1::ILogger {
  public:
    void log(Severity severity, const char* message) noexcept override {
        if (severity != Severity::kERROR && severity != Severity::kINTERNAL_ERROR) return;
        try {
            const std::lock_guard<std::mutex> lock(mutex_);
            errors_.emplace_back(message);
            if (errors_.size() > most) errors_.pop_front();
        } catch (...) { // no memory: an error less
        }
    }

    /// The newest `count` errors, a line each.
    std::string last(std::size_t count) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::string text;
        for (std::size_t i = errors_.size() - std::min(count, errors_.size()); i < errors_.size(); ++i)
            text += (text.empty() ? "" : "\n  ") + errors_[i];
        return text.empty() ? "it gave no reason" : text;
    }

  private:
    static constexpr std::size_t most = 20;

    mutable std::mutex mutex_;
    std::deque<std::string> errors_;
};

} // namespace mars
