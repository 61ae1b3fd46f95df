// Steps that ONNX Runtime's CUDA provider captures, over a stub of the provider: the numbers, sizes, threads and memory that its rules ask for.
// MARS_BUNDLE is a bundle of this project's, in fp32 (tests/runtime/cpp/test_cpp_ort_graphs.py makes it).
#include <algorithm>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <mars/batcher.hpp>
#include <mars/errors.hpp>
#include <mars/session.hpp>

#include "config.hpp"
#include "device/ort_graphs.hpp"
#include "device/ort_rows.hpp"
#include "stub_gpu.hpp"

TEST_CASE("answers are the host's, and most steps are replays") {
    Gpu gpu;
    Served served(gpu.opened());
    for (const std::optional<double>& tau : {std::optional<double>(1.0), std::optional<double>(0.3), std::optional<double>()}) {
        check_answers(served.session, config_of(tau));
        if (tau) check_answers(served.session, config_of(tau), {mars::Commit::Kind::block, 16});
    }
    CHECK(gpu.stub.count("replayed") > gpu.stub.count("captured"));
    CHECK(gpu.stub.count("captured") > 2);
    CHECK(served.backend.num_graphs() == gpu.stub.count("captured"));
    CHECK_FALSE(served.backend.why_no_graphs());
    CHECK(gpu.stub.threads.size() == 1);
    CHECK(gpu.stub.threads.count(std::this_thread::get_id()) == 0);
    const std::int64_t block = bundle().manifest.block;
    const std::set<std::int64_t> sizes{1, block, 2 * block - 1};
    for (const auto& [slots, outputs] : gpu.stub.sizes) CHECK((sizes.count(slots) == 1 && sizes.count(outputs) == 1));
}

TEST_CASE("many threads, a batcher and the prefix store share one thread of the GPU") {
    Gpu gpu;
    {
        Served alone(gpu.opened()), shared(gpu.opened(), 64 << 20); // the stub tells of two threads on the GPU at once
        const auto config = config_of(std::nullopt);
        std::vector<std::future<Tokens>> answers;
        for (int i = 0; i < 8; ++i)
            answers.push_back(std::async(
                std::launch::async, [&, i] { return alone.session.generate(prompts[static_cast<std::size_t>(i % 4)], config).token_ids; }));
        mars::Batcher service(shared.session, {});
        std::vector<mars::Request> requests;
        for (std::size_t i = 0; i < 12; ++i) requests.push_back(service.submit(prompts[i % 4], config));
        for (std::size_t i = 0; i < 12; ++i) CHECK(requests[i].result().token_ids == host().generate(prompts[i % 4], config).token_ids);
        for (std::size_t i = 0; i < 8; ++i) CHECK(answers[i].get() == host().generate(prompts[i % 4], config).token_ids);
        for (const bool is_second : {false, true})
            CHECK((shared.session.generate(prompts[3], config_of(1.0)).stats.cached_tokens > 0) >= is_second);
        CHECK(std::min(alone.backend.num_graphs(), shared.backend.num_graphs()) > 0);
    }
    CHECK(gpu.stub.threads.size() == 1);
    CHECK(gpu.stub.live == 0); // all memory was given back with the sessions
}

TEST_CASE("a shape runs plainly, then is captured, then replayed, at the same addresses") {
    Gpu gpu;
    const auto backend = gpu.opened();
    const auto tried = gpu.stub.runs;
    REQUIRE(tried.size() == 26); // two that try where KV rows are, and of three sizes four steps, each once more plainly
    for (std::size_t size = 0; size < 3; ++size)
        for (std::size_t i = 0; i < 4; ++i) {
            const auto& run = tried[2 + 8 * size + 2 * i];
            CHECK(run.how == (i == 0 ? "plain" : i == 1 ? "captured" : "replayed"));
            CHECK(run.number == (i == 0 ? -1 : static_cast<std::int64_t>(size) + 1));
            CHECK(tried[2 + 8 * size + 2 * i + 1].number == -1);
        }
    CHECK(backend->traffic().sent == 0);
    const auto rows = backend->new_cache(2);
    const auto plain = gpu.opened({});
    const auto others = plain->new_cache(2);
    const std::int64_t block = bundle().manifest.block;
    std::set<unsigned char*> addresses;
    for (std::int64_t i = 0; i < 5; ++i) {
        const auto found = step(*backend, *rows, 1, 1, i * block, block, block),
                   right = step(*plain, *others, 1, 1, i * block, block, block);
        CHECK(found.token_ids == right.token_ids);
        CHECK(found.confidence == right.confidence);
        CHECK(found.entropy == right.entropy);
        addresses.insert(dynamic_cast<mars::DeviceRows&>(*rows).at(0, 0));
    }
    CHECK(addresses.size() == 1);
    REQUIRE(gpu.stub.runs.size() == 31);
    for (std::size_t i = 0; i < 5; ++i) CHECK(gpu.stub.runs[26 + i].how == (i == 0 ? "plain" : i == 1 ? "captured" : "replayed"));
    CHECK(rows->capacity() == mars::least_entries);
    REQUIRE(gpu.stub.options.size() > 2);
    CHECK(gpu.stub.options[0] == mars::OrtOptions{{"arena_extend_strategy", "kSameAsRequested"}, {"enable_cuda_graph", "1"}});
    for (std::size_t i = 1; i < gpu.stub.options.size(); ++i) CHECK(gpu.stub.options[i].count("enable_cuda_graph") == 0); // copies are not
}

TEST_CASE("rows, widths and the likeliest tokens are kept apart; what was not asked for is not seen") {
    Gpu gpu;
    const auto backend = gpu.opened(), plain = gpu.opened({});
    const auto rows = backend->new_cache(3), others = plain->new_cache(3);
    std::int64_t start = 0;
    for (int turn = 0; turn < 4; ++turn)
        for (const std::int64_t slots : {1, 2, 4, 6, 7, 11})
            for (const bool want_topk : {false, true}) {
                CAPTURE(start);
                const std::int64_t first = start % 3, count = 1 + start % (3 - first), outputs = 1 + start % slots;
                // Every row has its entries: those that this step does not write are written plainly.
                for (const std::int64_t row : {0, 1, 2})
                    for (auto* pair : {&rows, &others}) {
                        auto& device = pair == &rows ? *backend : *plain;
                        if (row < first || row >= first + count) step(device, **pair, row, 1, start, slots, slots);
                    }
                const auto found = step(*backend, *rows, first, count, start, slots, outputs, want_topk);
                const auto right = step(*plain, *others, first, count, start, slots, outputs, want_topk);
                REQUIRE(found.token_ids.size() == static_cast<std::size_t>(count * outputs));
                CHECK(found.token_ids == right.token_ids);
                CHECK(found.top_k == right.top_k);
                CHECK(found.topk_ids == right.topk_ids);
                CHECK(found.topk_logprobs.size() == right.topk_logprobs.size());
                for (std::size_t i = 0; i < found.margin.size(); ++i)
                    CHECK(found.margin[i] == doctest::Approx(right.margin[i]).epsilon(1e-4));
                start += slots;
            }
    CHECK(gpu.stub.count("replayed") > 20);
}

TEST_CASE("steps that want logits, and pieces of prompts, run plainly") {
    Gpu gpu;
    Served served(gpu.opened());
    const std::size_t tried = gpu.stub.runs.size();
    mars::GenerationConfig sampled = config_of(0.3);
    sampled.temperature = 0.8;
    sampled.seed = 3;
    for (int i = 0; i < 3; ++i) check_answers(served.session, sampled);
    CHECK(gpu.numbers(tried) == std::set<std::int64_t>{-1});
}

TEST_CASE("requests that follow one another find their captured steps again") {
    Gpu gpu;
    Served served(gpu.opened());
    const auto config = config_of(0.5);
    for (int i = 0; i < 5; ++i) served.session.generate(prompts[1], config);
    const std::size_t count = served.backend.num_graphs(), live = gpu.stub.live, plain = gpu.stub.count("plain");
    for (int i = 0; i < 6; ++i)
        CHECK(served.session.generate(prompts[1], config).token_ids == host().generate(prompts[1], config).token_ids);
    CHECK(served.backend.num_graphs() == count);
    CHECK(gpu.stub.live == live);
    CHECK(gpu.stub.count("plain") - plain <= 6); // its prompt at most
}

TEST_CASE("captured steps are counted out") {
    Gpu gpu;
    const auto backend = gpu.opened(), plain = gpu.opened({});
    const auto rows = backend->new_cache(8), others = plain->new_cache(8);
    for (int turn = 0; turn < 2; ++turn)
        for (std::int64_t first = 0; first < 8; ++first)
            for (std::int64_t count = 1; count <= 8 - first; ++count)
                for (const std::int64_t outputs : {1, 6, 11})
                    for (const bool want_topk : {false, true}) step(*backend, *rows, first, count, 0, 11, outputs, want_topk);
    CHECK(backend->num_graphs() == mars::OrtGraphs::most);
    CHECK(*gpu.numbers(0).rbegin() == static_cast<std::int64_t>(mars::OrtGraphs::most));
    const auto found = step(*backend, *rows, 7, 1, 0, 11, 11), right = step(*plain, *others, 7, 1, 0, 11, 11);
    CHECK(gpu.stub.runs.back().number == -1);
    CHECK(found.token_ids == right.token_ids);
}

TEST_CASE("which GPU is said wherever sessions are made") {
    for (const mars::OrtOptions& extra : {mars::OrtOptions{}, on}) {
        Gpu gpu;
        mars::OrtOptions options{{"device_id", "2"}};
        options.insert(extra.begin(), extra.end());
        Served served(gpu.opened(options));
        check_answers(served.session, config_of(0.5));
        for (const auto& own : gpu.stub.options) CHECK(own.at("device_id") == "2");
    }
}

TEST_CASE("an answer that is ended hears it between replays, and the next one is whole") {
    Gpu gpu;
    Served served(gpu.opened());
    const auto config = config_of(0.3);
    for (int i = 0; i < 3; ++i) served.session.generate(prompts[1], config); // its steps are captured
    const auto rows = served.backend.new_cache(1);
    for (int i = 0; i < 3; ++i) step(served.backend, *rows, 0, 1, 0, 6, 6);
    const std::size_t replayed = gpu.stub.count("replayed");
    rows->interrupt();
    CHECK_THROWS_AS(step(served.backend, *rows, 0, 1, 0, 6, 6), mars::Interrupted);
    CHECK(gpu.stub.count("replayed") == replayed);
    CHECK_FALSE(served.backend.why_no_graphs());
    check_answers(served.session, config);
}

TEST_CASE("memory that was given up comes again zeroed, at the same addresses, and does not pile up") {
    Gpu gpu;
    const auto backend = gpu.opened();
    const auto addresses = [&](std::int64_t num_rows, std::int64_t entries) {
        const auto cache = backend->new_cache(num_rows);
        cache->reserve(entries);
        auto& rows = dynamic_cast<mars::DeviceRows&>(*cache);
        const auto bytes = rows.fetch(*rows.save(0, 3));
        CHECK(std::all_of(bytes.begin(), bytes.end(), [](unsigned char byte) { return byte == 0; }));
        step(*backend, *cache, 0, 1, 0, 6, 6);
        return std::pair(rows.at(0, 0), rows.at(1, 0));
    };
    const auto first = addresses(1, 10);
    CHECK(addresses(1, 500) == first);
    CHECK(addresses(1, 600) != first);
    CHECK(addresses(1, 10) == first);
    std::size_t most = 0;
    for (std::int64_t num_rows = 1; num_rows < 14; ++num_rows) {
        addresses(num_rows, 10);
        most = std::max(most, num_rows > 6 ? gpu.stub.live : most);
    }
    CHECK(gpu.stub.live <= most);
    CHECK((mars::doubled(1, 0) == 512 && mars::doubled(513, 512) == 1024 && mars::doubled(3000, 512) == 4096));
}
