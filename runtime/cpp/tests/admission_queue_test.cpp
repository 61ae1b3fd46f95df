// Which requests a batcher admits: places and rows, each client's share, limits of one request, invalid limits.
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <mars/batcher.hpp>
#include <mars/errors.hpp>

#include "batcher/admission_queue.hpp"
#include "config.hpp"
#include "conformance.hpp"
#include "gated.hpp"

using namespace std::chrono_literals;

TEST_CASE("every case of admission.json: which requests are admitted") {
    for (const auto& each : conformance("admission.json")) {
        CAPTURE(each["name"].get<std::string>());
        mars::Limits limits = limits_of(each["max_rows"], each["max_waiting"]);
        limits.client_share = each["client_share"];
        limits.max_rows_per_client = optional_of<std::int64_t>(each["max_rows_per_client"]);
        mars::AdmissionQueue admission(limits);
        for (const auto& event : each["events"]) {
            const auto client = optional_of<std::string>(event[0]);
            if (event.size() == 1) {
                admission.forget(client);
                continue;
            }
            CAPTURE(event.dump());
            const auto refusal = admission.refusal(client, event[1], event[2]);
            const std::string said = refusal ? refusal->what() : "";
            if (event[3].is_null()) {
                CHECK(said.empty());
                admission.admit(client);
            } else {
                CHECK(said.find("(" + event[3].get<std::string>() + ")") != std::string::npos);
            }
        }
    }
}

TEST_CASE("a full queue refuses with retry_after, or waits for room") {
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

TEST_CASE("a burst fills rows and queue, even before the first step") {
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

TEST_CASE("clients take turns, and one client cannot take all rows or places") {
    Opened opened;
    opened.backend.open(false);
    mars::Limits limits = limits_of(3, 4);
    limits.max_rows_per_client = 1;
    mars::Batcher batcher(opened.session, limits);
    std::vector<mars::Request> there;
    std::mutex mutex;
    std::vector<std::string> ended; // the clients, in order
    const auto ask = [&](const char* client, std::int64_t tokens = 2) {
        const auto on_event = [&, client](const mars::Event& event) {
            const std::lock_guard<std::mutex> lock(mutex);
            if (event.finish_reason) ended.emplace_back(client);
            return false;
        };
        there.push_back(batcher.submit(fake::Tokens{1}, config_of(1.0, tokens), {0.0, std::string(client), on_event}));
    };
    ask("flood", 8);
    for (int i = 0; i < 4; ++i) ask("flood");
    CHECK(message_of([&] { ask("flood"); }).find("4 requests wait already") == 0);
    ask("a");
    CHECK_NOTHROW(there.push_back(batcher.submit(fake::Tokens{1}, config_of(1.0, 2)))); // without a client
    CHECK(message_of([&] { ask("b"); }).find("4 requests wait already") == 0);
    opened.backend.open();
    for (mars::Request& request : there) request.result(30.0);
    CHECK(batcher.close());
    REQUIRE(ended.size() == 6);
    CHECK(ended.front() == "a"); // the first of the flood has 8 tokens, and the others wait for it

    opened.backend.open(false);
    limits = limits_of(1, 3);
    limits.client_share = 0.5;
    mars::Batcher shared(opened.session, limits);
    const auto submit = [&] { there.push_back(shared.submit(fake::Tokens{1}, config_of(1.0, 2), {0.0, std::string("a")})); };
    submit();
    submit();
    CHECK(message_of(submit).find("this client has 2 requests here already (client_share)") == 0);
    opened.backend.open();
}

TEST_CASE("requests that are sent and cancelled use no memory") {
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

TEST_CASE("rows are free only while the KV memory has room for them") {
    Opened opened;
    opened.backend.open(false);
    mars::Limits limits = limits_of(4, 1);
    limits.kv_bytes = (1 + 3000 + 64) * 8; // one endless row
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

TEST_CASE("limits of one request") {
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
    CHECK(refusal(fake::Tokens(6, 1), config_of({}, 7)).find("the prompt has 6 tokens, 5 are allowed here") == 0);
    CHECK(refusal({1}, config_of({}, 8)) == "8 max_new_tokens are requested, this service allows at most 7; request fewer");
    mars::GenerationConfig config = config_of({}, 7);
    config.eos_ids = fake::Tokens{1, 2};
    CHECK(refusal({1}, config) == "2 eos_ids are requested, this service allows at most 1; request fewer");
    CHECK(refusal({}, config_of({}, 7)).find("the prompt is empty") == 0);
    CHECK(refusal({99}, config_of({}, 7)).find("token ids outside the vocabulary") == 0);
    CHECK(refusal({1}, config_of(-1.0, 7)).find("tau must be") == 0);
    CHECK(batcher.counts().refused == 6);
    limits.kv_bytes = 8 * 70;
    mars::Batcher small(opened.session, limits);
    CHECK(message_of([&] {
              small.submit(fake::Tokens{1}, config_of({}, 7));
          }).find("a prompt of 1 tokens with max_new_tokens 7 may need") == 0);
}

TEST_CASE("invalid limits are refused") {
    mars::Limits wrong;
    wrong.max_rows = 0;
    wrong.kv_bytes = -1;
    wrong.client_share = 1.5;
    CHECK(message_of([&] { mars::Batcher(Opened().session, wrong); }) ==
          "max_rows must be 1 or more, not 0; kv_bytes must be 1 or more, not -1; client_share must be a number above 0, at most 1, not "
          "1.500000");
}
