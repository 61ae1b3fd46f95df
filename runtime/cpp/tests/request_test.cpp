// One request of a batcher over a fake model: cancelled, left, late, heard by a callback, steered on the way.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include <doctest/doctest.h>

#include <mars/batcher.hpp>
#include <mars/errors.hpp>

#include "config.hpp"
#include "gated.hpp"

TEST_CASE("cancelling frees the row before the next step, and later events are dropped") {
    Opened opened;
    opened.backend.open(false);
    mars::Batcher batcher(opened.session, limits_of(1));
    mars::Request first = batcher.submit(fake::Tokens{1, 2}, endless), second = batcher.submit(fake::Tokens{3}, config_of(1.0, 3));
    mars::Request third = batcher.submit(fake::Tokens{4}, config_of(1.0, 3));
    opened.backend.wait_for_step();
    CHECK(batcher.step_seconds() > 0);
    first.cancel();
    CHECK(first.finish_reason() == mars::FinishReason::cancelled); // although its step hangs
    CHECK(first.next()->finish_reason == mars::FinishReason::cancelled);
    CHECK_FALSE(first.next());
    third.cancel();
    third.cancel();
    opened.backend.open();
    CHECK(second.result(30.0).token_ids.size() == 3);
    CHECK(first.completion().token_ids.empty());
    CHECK(third.completion().token_ids.empty());
    CHECK(third.completion().stats.queue_time > 0);
    const mars::Counts counts = batcher.counts();
    CHECK(counts.cancelled == 2);
    CHECK(counts.finished == 1);
}

TEST_CASE("destroying a request ends it") {
    Opened opened;
    mars::Batcher batcher(opened.session, limits_of(1));
    {
        mars::Request left = batcher.submit(fake::Tokens{1, 2}, endless);
        left.next();
        mars::Request other = batcher.submit(fake::Tokens{3}, endless);
        left = std::move(other); // the first is left here
    }
    mars::Request last = batcher.submit(fake::Tokens{5}, config_of({}, 4));
    CHECK(last.result(30.0).token_ids.size() == 4);
    CHECK(batcher.counts().cancelled == 2);
}

TEST_CASE("seconds that are not a number are refused") {
    Opened opened;
    mars::Batcher batcher(opened.session, limits_of(1));
    const double nan = std::numeric_limits<double>::quiet_NaN();
    CHECK(message_of([&] { batcher.submit(fake::Tokens{1}, config_of({}, 4), {nan}); }) == "wait must be a number of seconds, not nan");
    mars::Request request = batcher.submit(fake::Tokens{1}, config_of({}, 4));
    CHECK(message_of([&] { request.result(nan); }) == "timeout must be a number of seconds, not nan");
    CHECK(message_of([&] { batcher.close(nan); }) == "drain must be a number of seconds, not nan");
    CHECK(message_of([&] { batcher.close(0.0, nan); }) == "timeout must be a number of seconds, not nan");
    CHECK(request.result(30.0).token_ids.size() == 4);
}

TEST_CASE("deadlines end waiting, running and hanging requests") {
    Opened opened;
    opened.backend.open(false);
    mars::Batcher batcher(opened.session, limits_of(1));
    mars::GenerationConfig soon = endless;
    soon.deadline = 0.05;
    mars::Request hanging = batcher.submit(fake::Tokens{1}, soon), waiting = batcher.submit(fake::Tokens{2}, soon);
    CHECK(hanging.result(30.0).finish_reason == mars::FinishReason::deadline);
    CHECK(waiting.next()->finish_reason == mars::FinishReason::deadline);
    opened.backend.open();
    mars::Request running = batcher.submit(fake::Tokens{3}, soon);
    const mars::Completion done = running.result();
    CHECK((done.finish_reason == mars::FinishReason::deadline || done.finish_reason == mars::FinishReason::length));
    CHECK(batcher.counts().expired >= 2);
    soon.deadline = -1.0;
    CHECK(message_of([&] { batcher.submit(fake::Tokens{3}, soon); }).find("deadline must be") == 0);
    soon.deadline = std::nan("");
    CHECK(message_of([&] { batcher.submit(fake::Tokens{3}, soon); }).find("deadline must be") == 0);
    CHECK(batcher.counts().refused == 2);
}

TEST_CASE("a callback sees every event once, in order, and the last one however the answer ended") {
    Opened opened;
    mars::Batcher batcher(opened.session, limits_of(2));
    fake::Tokens seen;
    int lasts = 0;
    const auto noting = [&](const mars::Event& event) {
        seen.insert(seen.end(), event.token_ids.begin(), event.token_ids.end());
        lasts += event.finish_reason.has_value();
        return false;
    };
    mars::Request whole = batcher.submit(fake::Tokens{1, 2}, config_of(0.3, 25), {0.0, std::nullopt, noting});
    CHECK_THROWS_WITH_AS(whole.next(), "the events of this request go to its callback; wait for its result", mars::SessionError);
    CHECK(whole.result(30.0).token_ids == seen);
    CHECK(lasts == 1);
    seen.clear();
    mars::Request stopped = batcher.submit(fake::Tokens{1, 2}, endless, {0.0, std::nullopt, [&](const mars::Event& event) {
                                                                             noting(event);
                                                                             return seen.size() >= 3;
                                                                         }});
    const mars::Completion done = stopped.result(30.0);
    CHECK(done.finish_reason == mars::FinishReason::cancelled);
    CHECK(done.token_ids == seen);
    CHECK(lasts == 2);
    mars::Request thrown =
        batcher.submit(fake::Tokens{1}, endless, {0.0, std::nullopt, [](const mars::Event&) -> bool { throw std::out_of_range("mine"); }});
    CHECK_THROWS_AS(thrown.result(30.0), std::out_of_range);
    // From its callback a request may be followed by another, ended, and the batcher looked at.
    std::optional<mars::Request> follower;
    mars::Request chain = batcher.submit(fake::Tokens{1}, config_of(1.0, 1), {0.0, std::nullopt, [&](const mars::Event&) {
                                                                                  follower =
                                                                                      batcher.submit(fake::Tokens{2}, config_of({}, 3));
                                                                                  return batcher.counts().accepted < 0;
                                                                              }});
    chain.result(30.0);
    CHECK(follower->result(30.0).token_ids.size() == 3);
    {
        std::atomic<bool> gone{false};
        opened.backend.open(false);
        const std::int64_t before = opened.backend.entered();
        {
            mars::Request left = batcher.submit(fake::Tokens{6}, endless, {0.0, std::nullopt, [&](const mars::Event&) {
                                                                               CHECK_FALSE(gone);
                                                                               return false;
                                                                           }});
            opened.backend.wait_for_step(before + 1);
        }
        gone = true; // no callback from here on
        opened.backend.open();
        CHECK(batcher.submit(fake::Tokens{7}, config_of({}, 2)).result(30.0).token_ids.size() == 2);
    }
}

TEST_CASE("tau and exact can change while a request runs, from any thread") {
    Opened opened;
    mars::Batcher batcher(opened.session);
    opened.backend.open(false);
    mars::Request request = batcher.submit(fake::Tokens{5, 6}, config_of(1.0, 400));
    CHECK(request.tau() == 1.0);
    opened.backend.wait_for_step(); // which has seen the tau before
    std::thread steering([&] { request.set_tau(0.0); });
    steering.join();
    opened.backend.open();
    CHECK(request.next()->token_ids.size() == 1);
    std::size_t longest = 0;
    while (const auto event = request.next()) longest = std::max(longest, event->token_ids.size());
    CHECK(longest > 1);
    request.set_exact(true);
    CHECK(request.exact());
    CHECK_THROWS_AS(request.set_tau(-1), mars::SessionError);
}
