// The batcher over a fake model: many threads, cancels, deadlines, full queues, failures, callbacks and the end.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <mars/batcher.hpp>

#include "answers.hpp"
#include "config.hpp"
#include "conformance.hpp"
#include "fake.hpp"
#include "manifest.hpp"
#include "places.hpp"

namespace {

using namespace std::chrono_literals;

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
        if (fails) throw mars::DeviceError("the device is gone");
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
        REQUIRE(changed_.wait_for(lock, 60s, [&] { return entered_ >= number; }));
    }

    std::int64_t entered() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return entered_;
    }

    std::atomic<bool> fails{false}, starves{false};
    std::atomic<std::int64_t> widest{0};

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_open_ = true;
    std::int64_t entered_ = 0;
};

constexpr std::int64_t context = 4000;

struct Opened {
    explicit Opened(std::unique_ptr<Gated> made = std::make_unique<Gated>(fake::hashed, context))
        : backend(*made),
          session(mars::Opened::over({"nowhere", mars::parse_manifest(valid().dump())}, std::move(made), std::nullopt, 1 << 20)) {
        session.set_cost({{1, 1e-4}, {64, 3e-4}}); // no steps of a measurement pass the gate
    }

    Gated& backend;
    mars::Session session;
};

const mars::GenerationConfig endless = config_of(1.0, 3000);

std::string message_of(const std::function<void()>& body) {
    try {
        body();
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}

fake::Tokens read(mars::Request& request) {
    fake::Tokens tokens;
    while (const auto event = request.next()) tokens.insert(tokens.end(), event->token_ids.begin(), event->token_ids.end());
    return tokens;
}

mars::Limits limits_of(std::int64_t max_rows, std::int64_t max_waiting = 64) {
    mars::Limits limits;
    limits.max_rows = max_rows;
    limits.max_waiting = max_waiting;
    return limits;
}

} // namespace

TEST_CASE("many threads get what each would get alone") {
    Opened opened;
    mars::Limits limits = limits_of(3, 200);
    limits.prefill_tokens = 16;
    mars::Batcher batcher(opened.session, limits);
    constexpr int threads = 4, each = 12;
    std::vector<std::thread> clients;
    std::vector<mars::Completion> found(threads * each);
    std::atomic<int> wrong{0};
    const auto asked = [](int seed) {
        mars::GenerationConfig config = config_of(seed % 3 == 0 ? std::nullopt : std::optional(0.2 + 0.3 * (seed % 3)), 1 + seed % 29);
        config.window = seed % 5 == 0 ? 2 : mars::full_window;
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
    CHECK(counts.finished == counts.ended());
    CHECK(counts.finished == counts.accepted);
    CHECK(opened.backend.widest > 1); // they were one batch
    CHECK(batcher.num_waiting() == 0);
}

TEST_CASE("cancelling frees the row before the next step, and nobody is told what came too late") {
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

TEST_CASE("leaving a request ends it") {
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

TEST_CASE("a cancelled step ends in the middle, where nobody else is in it") {
    auto made = std::make_unique<Gated>(fake::hashed, context);
    made->hangs = true;
    Opened opened(std::move(made));
    mars::Batcher batcher(opened.session, limits_of(2));
    mars::Request hanging = batcher.submit(fake::Tokens{1, 2}, endless);
    opened.backend.wait_for_step();
    opened.backend.hangs = true;
    hanging.cancel();
    opened.backend.wait_for_step(1);
    opened.backend.hangs = false; // for the next one; the first was told
    mars::Request next = batcher.submit(fake::Tokens{3}, config_of({}, 4));
    CHECK(next.result(30.0).token_ids == opened.session.generate(fake::Tokens{3}, config_of({}, 4)).token_ids);
    CHECK(batcher.counts().failed == 0);
}

TEST_CASE("deadlines end what waits, what runs and what hangs") {
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

TEST_CASE("a full queue refuses with a hint, or waits for room") {
    Opened opened;
    opened.backend.open(false);
    mars::Batcher batcher(opened.session, limits_of(1, 2));
    std::vector<mars::Request> there;
    there.push_back(batcher.submit(fake::Tokens{1}, endless));
    opened.backend.wait_for_step();
    for (int i = 0; i < 2; ++i) there.push_back(batcher.submit(fake::Tokens{2}, endless));
    CHECK(batcher.num_waiting() == 2);
    try {
        batcher.submit(fake::Tokens{3}, endless);
        FAIL("there is no room");
    } catch (const mars::Overloaded& full) {
        CHECK(std::string(full.what()).find("2 requests wait already (max_waiting); try again in 1 s") == 0);
        CHECK(full.retry_after == 1.0);
    }
    const auto began = std::chrono::steady_clock::now();
    CHECK_THROWS_AS(batcher.submit(fake::Tokens{3}, endless, {0.05}), mars::Overloaded);
    CHECK(std::chrono::steady_clock::now() - began >= 50ms);
    mars::GenerationConfig soon = endless;
    soon.deadline = 0.05;
    CHECK_THROWS_AS(batcher.submit(fake::Tokens{3}, soon, {std::nullopt}), mars::Overloaded); // no longer than its deadline
    std::optional<mars::Request> late;
    std::thread waiter([&] { late = batcher.submit(fake::Tokens{3}, config_of(1.0, 1), {std::nullopt}); });
    for (mars::Request& request : there) request.cancel();
    opened.backend.open();
    waiter.join();
    CHECK(late->result(30.0).token_ids.size() == 1);
    CHECK(batcher.counts().overloaded == 3);
}

TEST_CASE("every case of places.json: who is let in") {
    for (const auto& each : conformance("places.json")) {
        CAPTURE(each["name"].get<std::string>());
        mars::Limits limits = limits_of(each["max_rows"], each["max_waiting"]);
        limits.client_share = each["client_share"];
        limits.max_rows_per_client = optional_of<std::int64_t>(each["max_rows_per_client"]);
        mars::Places places(limits);
        for (const auto& event : each["events"]) {
            const auto client = optional_of<std::string>(event[0]);
            if (event.size() == 1) {
                places.forget(client);
                continue;
            }
            CAPTURE(event.dump());
            const auto refusal = places.refusal(client, event[1], event[2]);
            const std::string said = refusal ? refusal->what() : "";
            if (event[3].is_null()) {
                CHECK(said.empty());
                places.enter(client);
            } else {
                CHECK(said.find("(" + event[3].get<std::string>() + ")") != std::string::npos);
            }
        }
    }
}

TEST_CASE("a burst finds rows and places, however early it comes") {
    Opened opened;
    opened.backend.open(false);
    mars::Batcher batcher(opened.session, limits_of(3, 2));
    std::vector<mars::Request> burst;
    for (int i = 0; i < 5; ++i) burst.push_back(batcher.submit(fake::Tokens{1}, config_of(1.0, 2)));
    for (int i = 0; i < 3; ++i)
        CHECK(message_of([&] { batcher.submit(fake::Tokens{1}); }).find("2 requests wait already (max_waiting)") == 0);
    opened.backend.wait_for_step();
    burst.front().cancel();
    burst.front() = batcher.submit(fake::Tokens{1}, config_of(1.0, 2));
    opened.backend.open();
    for (mars::Request& request : burst) CHECK(request.result(30.0).token_ids.size() == 2);
}

TEST_CASE("clients take turns, and a flood leaves rows to others") {
    Opened opened;
    opened.backend.open(false);
    mars::Limits limits = limits_of(3, 4);
    limits.max_rows_per_client = 1;
    mars::Batcher batcher(opened.session, limits);
    std::vector<mars::Request> there;
    const auto ask = [&](const char* client) {
        there.push_back(batcher.submit(fake::Tokens{1}, config_of(1.0, 2), {0.0, std::string(client)}));
    };
    for (int i = 0; i < 5; ++i) ask("flood");
    CHECK(message_of([&] { ask("flood"); }).find("4 requests wait already") == 0);
    ask("a");
    CHECK_NOTHROW(there.push_back(batcher.submit(fake::Tokens{1}, config_of(1.0, 2)))); // nobody's
    CHECK(message_of([&] { ask("b"); }).find("4 requests wait already") == 0);
    opened.backend.open();
    for (mars::Request& request : there) CHECK(request.result(30.0).token_ids.size() == 2);
    CHECK(there[5].result().stats.queue_time < there[1].result().stats.queue_time);
}

TEST_CASE("who sends and cancels fills no memory") {
    Opened opened;
    opened.backend.open(false);
    mars::Batcher batcher(opened.session, limits_of(2, 3));
    mars::Request running = batcher.submit(fake::Tokens{1}, endless);
    opened.backend.wait_for_step();
    int sent = 0;
    const std::string words = message_of([&] {
        for (; sent < 100; ++sent) batcher.submit(fake::Tokens{1}, endless).cancel();
    });
    CHECK(words.find("requests wait already (max_waiting)") != std::string::npos);
    CHECK(sent == 5);
    running.cancel();
    opened.backend.open();
    CHECK(batcher.submit(fake::Tokens{1}, config_of(1.0, 2), {30.0}).result(30.0).token_ids.size() == 2);
}

TEST_CASE("rows that the KV memory has no room for are not free, and are again once it has") {
    Opened opened;
    opened.backend.open(false);
    mars::Limits limits = limits_of(4, 1);
    limits.kv_bytes = 30 * 128 * 8; // one endless row, with the quarter more that memory grows by
    mars::Batcher batcher(opened.session, limits);
    mars::Request running = batcher.submit(fake::Tokens{1}, endless);
    opened.backend.wait_for_step();
    mars::Request waiting = batcher.submit(fake::Tokens{1}, endless);
    CHECK(message_of([&] { batcher.submit(fake::Tokens{1}, endless); }).find("1 requests wait already (max_waiting)") == 0);
    running.cancel();
    waiting.cancel();
    opened.backend.open();
    CHECK(batcher.submit(fake::Tokens{1}, config_of(1.0, 2), {30.0}).result(30.0).token_ids.size() == 2);
}

TEST_CASE("one client leaves places for the others") {
    Opened opened;
    opened.backend.open(false);
    mars::Limits limits = limits_of(1, 3);
    limits.client_share = 0.5;
    mars::Batcher batcher(opened.session, limits);
    std::vector<mars::Request> there;
    const auto ask = [&](const char* client) { there.push_back(batcher.submit(fake::Tokens{1}, endless, {0.0, std::string(client)})); };
    ask("a");
    ask("a");
    CHECK(message_of([&] { ask("a"); }).find("this client has 2 requests here already (client_share)") == 0);
    ask("b");
    there.front().cancel();
    opened.backend.open();
    for (mars::Request& request : there) request.cancel();
    CHECK_NOTHROW(batcher.submit(fake::Tokens{1}, endless, {30.0, std::string("a")}).cancel()); // once they are gone
}

TEST_CASE("what one request may ask for") {
    Opened opened;
    mars::Limits limits;
    limits.max_prompt_tokens = 5;
    limits.max_new_tokens = 7;
    limits.max_stops = 1;
    limits.kv_bytes = 8 * 512;
    mars::Batcher batcher(opened.session, limits);
    const auto refusal = [&](const fake::Tokens& prompt, mars::GenerationConfig config) {
        return message_of([&] { batcher.submit(prompt, config); });
    };
    CHECK(refusal(fake::Tokens(6, 1), config_of({}, 7)).find("the prompt has 6 tokens, 5 are taken here") == 0);
    CHECK(refusal({1}, config_of({}, 8)) == "8 max_new_tokens are asked for, this service gives at most 7; ask for fewer");
    mars::GenerationConfig config = config_of({}, 7);
    config.eos_ids = fake::Tokens{1, 2};
    CHECK(refusal({1}, config) == "2 eos_ids are asked for, this service gives at most 1; ask for fewer");
    CHECK(refusal({}, config_of({}, 7)).find("the prompt is empty") == 0);
    CHECK(refusal({99}, config_of({}, 7)).find("token ids outside the vocabulary") == 0);
    CHECK(refusal({1}, config_of(-1.0, 7)).find("tau must be") == 0);
    CHECK(batcher.counts().refused == 6);
    limits.kv_bytes = 8 * 100;
    mars::Batcher small(opened.session, limits);
    CHECK(message_of([&] {
              small.submit(fake::Tokens{1}, config_of({}, 7));
          }).find("a prompt of 1 tokens with max_new_tokens 7 may take") == 0);
}

TEST_CASE("limits that cannot be") {
    mars::Limits wrong;
    wrong.max_rows = 0;
    wrong.kv_bytes = -1;
    wrong.client_share = 1.5;
    CHECK(message_of([&] { mars::Batcher(Opened().session, wrong); }) ==
          "max_rows must be 1 or more, not 0; kv_bytes must be 1 or more, not -1; client_share must be a number above 0, at most 1, not "
          "1.500000");
}

TEST_CASE("what fails ends its requests and no others, whatever it was") {
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

TEST_CASE("a callback sees every event once, in its order, and the last one whoever ended the answer") {
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

TEST_CASE("tau and exact may change while a request runs, from any thread") {
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

TEST_CASE("closing drains for a while, then cancels; more is refused") {
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

TEST_CASE("whoever waits for room is told of the end") {
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

TEST_CASE("rows share what was read before") {
    Opened opened;
    mars::Batcher batcher(opened.session);
    const fake::Tokens prompt(300, 3);
    CHECK(batcher.submit(prompt, config_of({}, 3)).result(30.0).stats.cached_tokens == 0);
    CHECK(batcher.submit(prompt, config_of({}, 3)).result(30.0).stats.cached_tokens > 250);
    CHECK(opened.session.prefix_stats().hits == 1);
}

TEST_CASE("any number of arrivals, cancels and deadlines leave nothing behind") {
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
    CHECK(counts.ended() == 240);
    CHECK(counts.failed == 0);
    CHECK(batcher.num_running() == 0);
    CHECK(batcher.num_waiting() == 0);
    CHECK(batcher.kv_usage() == 0.0);
}
