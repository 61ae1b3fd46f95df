// The batcher over a fake model: many threads, failures, rows that share, the end, and nothing left behind.
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <mars/batcher.hpp>
#include <mars/errors.hpp>

#include "config.hpp"
#include "gated.hpp"

namespace {

using namespace std::chrono_literals;

fake::Tokens read(mars::Request& request) {
    fake::Tokens tokens;
    while (const auto event = request.next()) tokens.insert(tokens.end(), event->token_ids.begin(), event->token_ids.end());
    return tokens;
}

} // namespace

TEST_CASE("requests from many threads get the same answers as alone") {
    Opened opened;
    mars::Limits limits = limits_of(3, 200);
    limits.prefill_tokens = 16;
    mars::Batcher batcher(opened.session, limits);
    constexpr int threads = 4, each = 12;
    std::vector<std::thread> clients;
    std::vector<mars::Completion> found(threads * each);
    std::atomic<int> wrong{0};
    const auto asked = [](int seed) {
        mars::GenerationConfig config = config_of(seed % 3 == 0 ? std::nullopt : std::optional(0.2 + 0.3 * (seed % 3)), 29 - seed % 29);
        config.masks = seed % 5 == 0 ? 1 : mars::all_masks;
        return std::pair(fake::Tokens(static_cast<std::size_t>(1 + 7 * seed % 60), 1 + seed % 12), config);
    };
    opened.backend.open(false);
    for (int i = 0; i < threads; ++i)
        clients.emplace_back([&, i] {
            for (int seed = i; seed < threads * each; seed += threads) {
                const auto [prompt, config] = asked(seed);
                mars::Request request = batcher.submit(prompt, config);
                const fake::Tokens tokens = read(request);
                found[static_cast<std::size_t>(seed)] = request.result(30.0);
                if (found[static_cast<std::size_t>(seed)].token_ids != tokens) ++wrong;
            }
        });
    while (batcher.counts().accepted < threads) std::this_thread::sleep_for(1ms);
    opened.backend.open();
    for (std::thread& client : clients) client.join();
    CHECK(wrong == 0);
    for (int seed = 0; seed < threads * each; ++seed) {
        CAPTURE(seed);
        const auto [prompt, config] = asked(seed);
        const mars::Completion own = opened.session.generate(prompt, config), &got = found[static_cast<std::size_t>(seed)];
        CHECK(got.token_ids == own.token_ids);
        CHECK(got.confidences == own.confidences);
        CHECK(got.finish_reason == own.finish_reason);
        CHECK(got.stats.accepted == own.stats.accepted);
        CHECK(got.stats.queue_time >= 0);
    }
    const mars::Counts counts = batcher.counts();
    CHECK(counts.accepted == threads * each);
    CHECK(counts.finished == counts.accepted);
    CHECK(opened.backend.widest > 1); // they were one batch
    CHECK(batcher.num_waiting() == 0);
}

TEST_CASE("any failure ends only the requests it concerns") {
    Opened opened;
    mars::Batcher batcher(opened.session, limits_of(3));
    opened.backend.fails = true;
    mars::Request lost = batcher.submit(fake::Tokens{1}, endless);
    CHECK_THROWS_AS(lost.result(30.0), mars::DeviceError);
    CHECK_THROWS_AS(lost.next(), mars::DeviceError);
    CHECK(lost.failed());
    opened.backend.fails = false;
    opened.backend.starves = true;
    mars::Request starved = batcher.submit(fake::Tokens{1}, endless);
    CHECK_THROWS_AS(starved.result(30.0), std::bad_alloc);
    opened.backend.starves = false;
    CHECK(batcher.alive());
    mars::Request fine = batcher.submit(fake::Tokens{1}, config_of({}, 5));
    CHECK(fine.result(30.0).token_ids.size() == 5);
    CHECK(batcher.counts().failed == 2);
}

TEST_CASE("a lost device ends the batcher and every request") {
    Opened opened;
    mars::Batcher batcher(opened.session, limits_of(1));
    opened.backend.open(false);
    mars::Request running = batcher.submit(fake::Tokens{1}, endless), waiting = batcher.submit(fake::Tokens{2}, endless);
    opened.backend.is_lost = true;
    opened.backend.open();
    CHECK_THROWS_AS(running.result(30.0), mars::DeviceLost);
    CHECK_THROWS_AS(waiting.result(30.0), mars::DeviceLost);
    CHECK_FALSE(batcher.alive());
    CHECK(opened.backend.entered() == 1); // it is tried once
    CHECK(message_of([&] { batcher.submit(fake::Tokens{1}); }) == "this batcher failed; make a new one");
}

#ifndef __SANITIZE_THREAD__ // which does not know forked threads
TEST_CASE("in a forked child a batcher and its requests refuse, and nothing waits") {
    Opened opened;
    auto batcher = std::make_unique<mars::Batcher>(opened.session, limits_of(1));
    opened.backend.open(false);
    mars::Request request = batcher->submit(fake::Tokens{1}, endless);
    opened.backend.wait_for_step();
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        const auto refuses = [](const auto& call) {
            try {
                call();
                return false;
            } catch (const mars::SessionError& error) {
                return std::string(error.what()).find("forked") != std::string::npos;
            }
        };
        bool good = !batcher->alive() && refuses([&] { batcher->submit(fake::Tokens{1}, endless); });
        good = good && refuses([&] { request.result(); }) && refuses([&] { request.next(); });
        {
            const mars::Request ended = std::move(request);
        }
        batcher.reset();
        _exit(good ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    opened.backend.open();
    CHECK(batcher->alive());
}
#endif

namespace {

/// A device whose steps end when they are interrupted, and not before.
struct Interruptible : fake::Backend {
    using fake::Backend::Backend;
    void step(mars::Cache& cache, std::int64_t first, const mars::StepInput& input, bool logits, mars::StepOutput& output) override {
        if (!waits) return fake::Backend::step(cache, first, input, logits, output);
        std::promise<void> stopped;
        input.interrupt->set_stop([&] { stopped.set_value(); });
        ++num_waiting;
        const bool is_stopped = stopped.get_future().wait_for(60s) == std::future_status::ready;
        input.interrupt->set_stop(nullptr);
        if (!is_stopped) throw mars::DeviceError("the step was not stopped");
        throw mars::Interrupted();
    }
    std::atomic<bool> waits{true};
    std::atomic<int> num_waiting{0};
};

} // namespace

TEST_CASE("a running step ends when all of its sequences have been ended: stream, rows of a batch, requests") {
    auto made = std::make_unique<Interruptible>(fake::hashed, context);
    Interruptible& backend = *made;
    const mars::Session session = mars::Opened::over({"nowhere", mars::parse_manifest(valid().dump())}, std::move(made));
    const auto when_waiting = [&](int steps, const std::function<void()>& call) {
        return std::thread([&backend, steps, call] {
            while (backend.num_waiting < steps) std::this_thread::sleep_for(1ms);
            call();
        });
    };
    mars::Stream stream = session.stream(fake::Tokens(300, 1), endless);
    std::thread other = when_waiting(1, [&] { stream.cancel(); });
    while (stream.next()) {
    }
    other.join();
    CHECK_FALSE(stream.failed());
    CHECK(stream.completion().finish_reason == mars::FinishReason::cancelled);
    CHECK(stream.completion().token_ids.empty());

    mars::Batcher batcher(session, limits_of(2));
    mars::Request one = batcher.submit(fake::Tokens{1}, endless);
    other = when_waiting(2, [&] { one.cancel(); });
    CHECK(one.result(30.0).finish_reason == mars::FinishReason::cancelled);
    other.join();
    backend.waits = false;
    CHECK(batcher.submit(fake::Tokens{1}, config_of({}, 5)).result(30.0).token_ids.size() == 5);

    mars::Interrupt interrupt(2); // two rows: a cancelled one does not end the step of the other
    bool is_stopped = false;
    interrupt.drop();
    interrupt.set_stop([&] { is_stopped = true; });
    CHECK_FALSE(is_stopped);
    interrupt.drop();
    CHECK(is_stopped);
}

TEST_CASE("a batcher that fails reports no running step") {
    struct Faulty : Gated {
        using Gated::Gated;
        std::unique_ptr<mars::Cache> new_cache(std::int64_t num_rows) override {
            if (is_faulty) throw 7; // what no device throws
            return Gated::new_cache(num_rows);
        }
        std::atomic<bool> is_faulty{false};
    };
    auto made = std::make_unique<Faulty>(fake::hashed, context);
    Faulty& backend = *made;
    Opened opened(std::move(made));
    mars::Batcher batcher(opened.session, limits_of(1));
    backend.is_faulty = true; // at the end, when new memory replaces that of the longest row
    CHECK_THROWS_AS(batcher.submit(fake::Tokens{1}, config_of({}, 5)).result(30.0), int);
    CHECK(batcher.step_seconds() == 0);
    CHECK(message_of([&] { batcher.submit(fake::Tokens{1}); }) == "this batcher failed; make a new one");
}

TEST_CASE("closing drains, then cancels, and refuses new requests") {
    Opened opened;
    auto batcher = std::make_unique<mars::Batcher>(opened.session, limits_of(1));
    mars::Request quick = batcher->submit(fake::Tokens{1}, config_of({}, 5));
    CHECK(batcher->close(30.0));
    CHECK(quick.result(1.0).token_ids.size() == 5);
    CHECK_FALSE(batcher->alive());
    CHECK(message_of([&] { batcher->submit(fake::Tokens{1}); }) == "this batcher is closed; make a new one");
    CHECK(batcher->close());

    batcher = std::make_unique<mars::Batcher>(opened.session, limits_of(1));
    opened.backend.open(false);
    mars::Request hanging = batcher->submit(fake::Tokens{1}, endless), waiting = batcher->submit(fake::Tokens{2}, endless);
    opened.backend.wait_for_step(opened.backend.entered() + (batcher->num_running() > 0 ? 0 : 1));
    CHECK_FALSE(batcher->close(0.05, 0.05)); // the step hangs
    CHECK(hanging.result(1.0).finish_reason == mars::FinishReason::cancelled);
    CHECK(waiting.next()->finish_reason == mars::FinishReason::cancelled);
    opened.backend.open();
    CHECK(batcher->close(0.0, std::nullopt));
    batcher = nullptr;
    CHECK(hanging.completion().token_ids.empty()); // a request outlives its batcher
    hanging.cancel();
}

TEST_CASE("closing ends the wait of callers that wait for room") {
    Opened opened;
    opened.backend.open(false);
    mars::Batcher batcher(opened.session, limits_of(1, 1));
    mars::Request first = batcher.submit(fake::Tokens{1}, endless);
    opened.backend.wait_for_step();
    mars::Request second = batcher.submit(fake::Tokens{1}, endless);
    std::string told;
    std::thread waiter([&] { told = message_of([&] { batcher.submit(fake::Tokens{2}, endless, {std::nullopt}); }); });
    std::this_thread::sleep_for(20ms);
    CHECK_FALSE(batcher.close(0.0, 0.01));
    waiter.join();
    CHECK(told == "this batcher is closed; make a new one");
    opened.backend.open();
}

TEST_CASE("requests use the prefix cache") {
    Opened opened;
    mars::Batcher batcher(opened.session);
    const fake::Tokens prompt(300, 3);
    CHECK(batcher.submit(prompt, config_of({}, 3)).result(30.0).stats.cached_tokens == 0);
    CHECK(batcher.submit(prompt, config_of({}, 3)).result(30.0).stats.cached_tokens > 250);
    CHECK(opened.session.prefix_stats().hits == 1);
}

TEST_CASE("arrivals, cancellations and deadlines in any order leak no places or rows") {
    Opened opened;
    mars::Limits limits = limits_of(4, 1000);
    limits.prefill_tokens = 8;
    mars::Batcher batcher(opened.session, limits);
    std::vector<std::thread> clients;
    std::atomic<int> wrong{0};
    for (unsigned i = 0; i < 4; ++i)
        clients.emplace_back([&, i] {
            for (unsigned j = 0; j < 60; ++j) {
                const std::uint64_t dice = fake::mix(i * 1000 + j);
                mars::GenerationConfig config = config_of(dice % 2 == 0 ? std::nullopt : std::optional(0.4), 1 + dice / 2 % 40);
                if (dice / 80 % 5 == 0) config.deadline = 0.001;
                const fake::Tokens prompt(1 + dice / 400 % 50, 1 + static_cast<std::int64_t>(dice / 20000 % 12));
                mars::Request request = batcher.submit(prompt, config);
                if (dice / 240000 % 4 == 0) request.cancel();
                if (dice / 960000 % 4 == 0) continue; // it is left
                const mars::Completion done = request.result(60.0);
                if (done.finish_reason != mars::FinishReason::length) continue;
                config.deadline = std::nullopt;
                if (done.token_ids != opened.session.generate(prompt, config).token_ids) ++wrong;
            }
        });
    for (std::thread& client : clients) client.join();
    CHECK(wrong == 0);
    CHECK(batcher.close(30.0));
    const mars::Counts counts = batcher.counts();
    CHECK(counts.accepted == 240);
    CHECK(counts.finished + counts.cancelled + counts.expired == 240);
    CHECK(counts.failed == 0);
    CHECK(batcher.num_running() == 0);
    CHECK(batcher.num_waiting() == 0);
    CHECK(batcher.kv_usage() == 0.0);
}

TEST_CASE("states of recurrent layers are a part of the KV memory, and keep cursor commit") {
    nlohmann::json manifest = valid();
    manifest["model"]["recurrent"] = {{"layers", {0}}, {"heads", 10}, {"key_dim", 100}, {"value_dim", 100}, {"inputs", 100}, {"width", 3}};
    const mars::Session session =
        mars::Opened::over({"nowhere", mars::parse_manifest(manifest.dump())}, std::make_unique<fake::Backend>(fake::hashed, 64));
    mars::Limits limits = limits_of(8, 16);
    limits.kv_bytes = 8 * 4 * (3 * 100 + 10 * 100 * 100);
    CHECK(message_of([&] { mars::Batcher(session, limits); }) ==
          "kv_bytes: the recurrent layers' states of 8 rows take 3 MB: give more, or fewer max_rows");
    *limits.kv_bytes += 4000;
    mars::Batcher(session, limits).submit(fake::Tokens{4}, config_of(0.5, 3)).result(30.0);
    CHECK(says(message_of([&] { session.generate(fake::Tokens{4}, config_of(0.5, 3), nullptr, 4); }), "cursor commit only"));
}
