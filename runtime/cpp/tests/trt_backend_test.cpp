// The TensorRT backend over a stub of TensorRT and CUDA: the loops' answers, outputs, the order on the stream, a step that fails.
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "loops.hpp"
#include "scripted.hpp"
#include "structured/constrained_sequence.hpp"
#include "stub_bundle.hpp"

TEST_CASE("both commits accept the same tokens as on other backends, with and without CUDA graphs") {
    for (const char* layout : {"in-place", "appended"})
        for (const bool fixed : {false, true})
            for (const stub::Refuses refuses :
                 {stub::Refuses::nothing, stub::Refuses::begin, stub::Refuses::end, stub::Refuses::instantiate})
                for (const std::int64_t cache_block : {1, 4}) {
                    CAPTURE(layout);
                    CAPTURE(fixed);
                    CAPTURE(static_cast<int>(refuses));
                    CAPTURE(cache_block);
                    EngineShape shape;
                    shape.fixed = fixed;
                    shape.kv_layout = layout;
                    const Made made(shape);
                    stub::state().refuses = refuses;
                    mars::TrtBackend backend = made.open();
                    fake::Backend reference(fake::hashed, backend.max_capacity(), backend.max_slots());
                    const auto expected = answers(reference, prompts, cache_block);
                    // The second time on memory that was used, the third with captured steps.
                    for (int i = 0; i < 3; ++i) CHECK(answers(backend, prompts, cache_block) == expected);
                    CHECK((stub::state().launches > 0) == (refuses == stub::Refuses::nothing));
                    CHECK(stub::state().captures == 0); // each captured graph was destroyed
                    CHECK(backend.num_graphs() <= static_cast<std::size_t>(stub::state().graphs));
                }
}

TEST_CASE("exact mode gives the one-token text on an engine of few predictions, with fewer draft tokens and masks") {
    const Made made; // as many predictions a step as the block has slots
    mars::TrtBackend backend = made.open();
    fake::Backend reference(fake::hashed, backend.max_capacity(), backend.max_slots());
    CHECK(answers(backend, prompts, 1, 20, nullptr, std::nullopt) == answers(reference, prompts, 1, 20, nullptr, 1.0));
}

TEST_CASE("an engine's top-k outputs are fetched only for steps that need them, at any size") {
    for (const bool fixed : {false, true}) {
        EngineShape shape;
        shape.top_k = 5;
        shape.fixed = fixed;
        const Made made(shape);
        mars::TrtBackend backend = made.open();
        fake::Backend reference(fake::hashed, backend.max_capacity(), backend.max_slots());
        for (int i = 0; i < 3; ++i) CHECK(answers(backend, prompts) == answers(reference, prompts));
        stub::state().wide = [](std::int64_t at, std::int64_t first) { return Tokens{first, 100 * at, 100 * at + 1, 100 * at + 2, 7}; };
        const auto cache = backend.new_cache(2);
        mars::StepOutput output;
        const auto fetched = [&](mars::StepInput asked, bool want_topk) {
            stub::state().events.clear();
            asked.want_topk = want_topk;
            backend.step(*cache, 0, asked, false, output);
            std::size_t size = 0;
            for (const auto& [kind, num_bytes] : stub::state().events) size += kind == "download" ? num_bytes : 0;
            return size;
        };
        const mars::StepInput asked{2,      3,           2, {3, 4, 5, 6, 7, 8},
                                    {0, 0}, {0, 2, 1, 2}}; // filled up to 4 slots, and 4 outputs if it is fixed
        for (int i = 0; i < 3; ++i) {
            CHECK(fetched(asked, true) == 2 * 256 + 512 + 256); // 3 x 4 predictions of 5 ids and log-probabilities at most
            CHECK(output.top_k == 5);
            REQUIRE(output.token_ids.size() == 4);
            REQUIRE(output.topk_ids.size() == 4 * 5);
            for (std::size_t at = 0; at < 4; ++at) {
                const std::int64_t position = asked.output_index[at] + 1;
                const Tokens own(output.topk_ids.begin() + static_cast<std::ptrdiff_t>(5 * at),
                                 output.topk_ids.begin() + static_cast<std::ptrdiff_t>(5 * at + 5));
                CHECK(own == Tokens{output.token_ids[at], 100 * position, 100 * position + 1, 100 * position + 2, 7});
                CHECK(output.topk_logprobs[5 * at + 4] == -4.0F);
            }
            CHECK(fetched(asked, false) == 2 * 256 + 512 + 256); // for ties
            CHECK(output.top_k == 0);
            CHECK(output.topk_ids.empty());
            CHECK(output.topk_logprobs.empty());
        }
    }
}

TEST_CASE("an engine and a graph give the same answers with a grammar") {
    int num_choices = 0;
    for (const auto& wanted : scripted::kept().json["answers"]) {
        if (wanted["logits"] || wanted["top_k"] == 0) continue;
        CAPTURE(wanted["name"].get<std::string>());
        EngineShape shape;
        shape.block = wanted["block"];
        shape.outputs = 2 * shape.block - 1;
        shape.capacity = shape.context = 1024;
        shape.prefill = 128;
        shape.top_k = wanted["top_k"];
        const Made made(shape);
        mars::TrtBackend engine = made.open();
        auto same = wanted;
        same["max_slots"] = *engine.max_slots();
        same["max_outputs"] = *engine.max_outputs();
        scripted::Model graph(wanted["script"].get<Tokens>(), same);
        stub::state().predict = [&](const Tokens& known, std::int64_t masks) { return graph.wanted(known, masks); };
        stub::state().wide = [&](std::int64_t at, std::int64_t first) { return graph.likeliest(at, first, shape.top_k); };
        const auto answer = [&](mars::Backend& backend) {
            mars::GrammarState grammar_state(mars::Matcher(scripted::kept().walk(wanted["grammar"])), {scripted::kept().end}, false,
                                             shape.block - 1);
            mars::ConstrainedSequence row(0, scripted::kept().prompt, scripted::config_of(wanted), {scripted::kept().end},
                                          std::move(grammar_state));
            std::string end = refused([&] {
                const auto loop = loops::decode(backend, {&row}, shape.block, fake::mask);
                while (loop->next()) {
                }
            });
            if (row.finish_reason) end += mars::to_string(*row.finish_reason);
            const mars::Stats& stats = row.stats;
            return std::tuple(row.tokens, end, Tokens{stats.forwards, stats.forced, stats.draft_tokens, stats.accepted_draft_tokens});
        };
        const auto expected = answer(graph);
        for (int i = 0; i < 3; ++i) { // the second time with captured steps
            const auto found = answer(engine);
            CHECK(std::get<0>(found) == std::get<0>(expected));
            CHECK(std::get<1>(found) == std::get<1>(expected));
            CHECK(std::get<2>(found) == std::get<2>(expected));
        }
        num_choices += std::get<0>(expected).size() > scripted::kept().prompt.size() ? 1 : 0;
    }
    CHECK(num_choices > 5);
}

TEST_CASE("only ids and confidences are downloaded, in the stream's order") {
    const Made made;
    mars::TrtBackend backend = made.open();
    const auto cache = backend.new_cache(3);
    mars::StepOutput output;
    for (int i = 0; i < 3; ++i) {
        stub::state().events.clear();
        stub::state().waits = 0;
        backend.step(*cache, 0, input(3, 4), false, output);
        std::vector<std::string> kinds;
        std::size_t fetched = 0;
        for (const auto& [kind, size] : stub::state().events) {
            kinds.push_back(kind);
            fetched += kind == "download" ? size : 0;
        }
        CHECK(kinds == std::vector<std::string>{"upload", "execute", "download"}); // one copy each way
        CHECK(fetched == 2 * 256);                                                 // each from where a tensor may begin
        CHECK(stub::state().waits == 1);
        CHECK(output.token_ids.size() == 3);
        CHECK(output.confidence[0] == fake::hashed({3}, 0).second);
    }
    CHECK(stub::state().launches == 2); // the first run prepares, the second is captured and replayed
}

TEST_CASE("results are downloaded at the size of the step") {
    EngineShape shape;
    shape.block = 40; // at most 3 x 40 ids take 960 bytes
    shape.capacity = 128;
    const Made made(shape);
    mars::TrtBackend backend = made.open();
    const auto cache = backend.new_cache(3);
    mars::StepOutput output;
    for (int i = 0; i < 3; ++i) {
        stub::state().events.clear();
        backend.step(*cache, 0, input(1, 1), false, output);
        CHECK(stub::state().events.back() == std::pair<std::string, std::size_t>("download", 2 * 256));
        CHECK(output.token_ids == Tokens{fake::hashed({3}, 0).first});
        CHECK(output.confidence[0] == fake::hashed({3}, 0).second);
    }
}

TEST_CASE("the lowest id of equally likely tokens wins, whichever TensorRT's TopK returns") {
    EngineShape shape;
    shape.top_k = 5;
    const Made made(shape);
    stub::state().num_ties = 2;
    stub::state().predict = [](const Tokens&, std::int64_t) { return std::pair(std::int64_t{900}, 0.3F); };
    stub::state().wide = [](std::int64_t, std::int64_t first) { return Tokens{first, 400, 700, 5, 6}; };
    mars::TrtBackend backend = made.open();
    const auto cache = backend.new_cache(1);
    mars::StepOutput output;
    for (const bool want_topk : {false, true}) {
        mars::StepInput asked = input(1, 2);
        asked.want_topk = want_topk;
        backend.step(*cache, 0, asked, false, output);
        CHECK(output.token_ids == Tokens{400});
    }
    CHECK(output.topk_ids == Tokens{400, 700, 900, 5, 6});
    stub::state().num_ties = 0;
    backend.step(*cache, 0, input(1, 2), false, output);
    CHECK(output.token_ids == Tokens{900});
}

TEST_CASE("a row near its end shares a step with a row with many masks") {
    for (const bool fixed : {false, true}) {
        CAPTURE(fixed);
        EngineShape shape;
        shape.fixed = fixed;
        const Made made(shape);
        mars::TrtBackend backend = made.open();
        const std::vector<Tokens> asked{Tokens(static_cast<std::size_t>(backend.max_capacity() - 2), 5), {6}};
        fake::Backend reference(fake::hashed, backend.max_capacity(), backend.max_slots());
        CHECK(answers(backend, asked, 1, 30) == answers(reference, asked, 1, 30));
    }
}

TEST_CASE("block commit with long blocks: a row at its end does not end the others") {
    EngineShape shape;
    shape.prefill = 32;
    shape.capacity = shape.context = 128;
    for (const char* layout : {"in-place", "appended"}) {
        shape.kv_layout = layout;
        const Made made(shape);
        mars::TrtBackend backend = made.open();
        fake::Backend reference(fake::hashed, backend.max_capacity(), backend.max_slots());
        for (std::int64_t left = 0; left < 8; ++left)
            for (const std::int64_t cache_block : {16, 32}) {
                CAPTURE(left);
                CAPTURE(cache_block);
                const std::vector<Tokens> asked{{6}, Tokens(static_cast<std::size_t>(backend.max_capacity() - left), 5), {7, 8}};
                CHECK(answers(backend, asked, cache_block, 60) == answers(reference, asked, cache_block, 60));
            }
    }
}

TEST_CASE("a failed step reports TensorRT's message, and the next one works") {
    const Made made;
    mars::TrtBackend backend = made.open();
    const auto cache = backend.new_cache(1);
    mars::StepOutput output;
    stub::state().fails = true;
    for (int i = 0; i < 2; ++i)
        CHECK(refused([&] { backend.step(*cache, 0, input(1, 2), false, output); }) ==
              "TensorRT failed in a step of 1 x 4 slots: the test made the stub fail");
    stub::state().fails = false;
    backend.step(*cache, 0, input(1, 2), false, output);
    CHECK(output.token_ids == Tokens{fake::hashed({3}, 0).first});
}
