// A model whose steps wait at a gate, and a session over it, for tests of the batcher.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include <doctest/doctest.h>

#include <mars/batcher.hpp>
#include <mars/errors.hpp>
#include <mars/session.hpp>

#include "config.hpp"
#include "fake.hpp"
#include "manifest.hpp"
#include "session/answers.hpp"

/// A model whose steps wait at a gate, and fail on demand.
class Gated : public fake::Backend {
  public:
    using fake::Backend::Backend;

    void step(mars::Cache& cache, std::int64_t first, const mars::StepInput& input, bool logits, mars::StepOutput& output) override {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            ++entered_;
            changed_.notify_all();
            changed_.wait(lock, [this] { return is_open_; });
        }
        if (fails) throw mars::DeviceError("the step failed");
        if (is_lost) throw mars::DeviceLost("the device is gone");
        if (starves) throw std::bad_alloc();
        widest = std::max(widest.load(), input.rows);
        fake::Backend::step(cache, first, input, logits, output);
    }

    void open(bool is_open = true) {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_open_ = is_open;
        changed_.notify_all();
    }

    /// Wait until a step stands before the gate, or has gone through.
    void wait_for_step(std::int64_t number = 1) {
        std::unique_lock<std::mutex> lock(mutex_);
        REQUIRE(changed_.wait_for(lock, std::chrono::seconds(60), [&] { return entered_ >= number; }));
    }

    std::int64_t entered() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return entered_;
    }

    std::atomic<bool> fails{false}, is_lost{false}, starves{false};
    std::atomic<std::int64_t> widest{0};

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_open_ = true;
    std::int64_t entered_ = 0;
};

inline constexpr std::int64_t context = 4000;

/// A session over that model, with a prefix store of a megabyte.
struct Opened {
    explicit Opened(std::unique_ptr<Gated> made = std::make_unique<Gated>(fake::hashed, context))
        : backend(*made),
          session(mars::Opened::over({"nowhere", mars::parse_manifest(valid().dump())}, std::move(made), std::nullopt, 1 << 20)) {
        session.set_cost({{1, 1e-4}, {64, 3e-4}}); // no steps of a measurement pass the gate
    }

    Gated& backend;
    mars::Session session;
};

inline const mars::GenerationConfig endless = config_of(1.0, 3000);

inline mars::Limits limits_of(std::int64_t max_rows, std::int64_t max_waiting = 64) {
    mars::Limits limits;
    limits.max_rows = max_rows;
    limits.max_waiting = max_waiting;
    return limits;
}
