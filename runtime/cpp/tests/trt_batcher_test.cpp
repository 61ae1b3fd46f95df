// Many requests and many threads over one TensorRT engine of the stub.
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <mars/batcher.hpp>
#include <mars/session.hpp>

#include "session/answers.hpp"
#include "stub_bundle.hpp"

TEST_CASE("requests of a batcher are rows of one batch of the engine, with the same answers as alone") {
    const Made made;
    std::vector<Tokens> wanted;
    {
        auto backend = made.open();
        for (const Tokens& prompt : prompts) wanted.push_back(answers(backend, {prompt}).front());
    }
    const mars::Session session =
        mars::Opened::over(made.bundle, std::make_unique<mars::TrtBackend>(made.bundle, made.bundle.manifest.variants.front()));
    session.set_cost({{1, 1e-4}, {64, 3e-4}});
    mars::Limits limits;
    limits.max_rows = 4;
    CHECK(refused([&] { mars::Batcher(session, limits); }).find("4 rows, but this engine was built for at most 3") == 0);
    CHECK(mars::Batcher(session).limits().max_rows == 3); // the engine's by default
    limits.max_rows = 3;
    std::promise<void> gate; // the first step waits until all requests are there
    const auto opened = gate.get_future().share();
    stub::state().predict = [opened](const Tokens& tokens, std::int64_t position) {
        opened.wait();
        return fake::hashed(tokens, position);
    };
    mars::Batcher batcher(session, limits);
    std::vector<mars::Request> requests;
    for (int round = 0; round < 4; ++round)
        for (const Tokens& prompt : prompts) {
            mars::GenerationConfig config;
            config.tau = 0.5;
            config.max_new_tokens = 20;
            config.masks = mars::all_masks;
            config.eos_ids.emplace();
            requests.push_back(batcher.submit(prompt, config));
        }
    gate.set_value();
    for (std::size_t i = 0; i < requests.size(); ++i) {
        Tokens all = prompts[i % prompts.size()];
        for (const std::int64_t token : requests[i].result(60.0).token_ids) all.push_back(token);
        CHECK(all == wanted[i % prompts.size()]);
    }
    CHECK(batcher.close());
    CHECK(batcher.counts().finished == 12);
    CHECK(stub::state().most_rows == 3);
}

TEST_CASE("many threads over one engine") {
    const Made made;
    auto backend = std::make_unique<mars::TrtBackend>(made.bundle, made.bundle.manifest.variants.front());
    fake::Backend reference(fake::hashed, backend->max_capacity(), backend->max_slots());
    const auto expected = answers(reference, prompts);
    std::vector<std::thread> threads;
    std::vector<int> equal(4);
    for (int& count : equal)
        threads.emplace_back([&] {
            for (int i = 0; i < 10; ++i) count += answers(*backend, prompts) == expected;
        });
    for (std::thread& thread : threads) thread.join();
    CHECK(equal == std::vector<int>(4, 10));
}
