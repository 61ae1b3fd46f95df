// The loop over a fake model: tests/conformance/loops.json exactly, and rows that change their minds.
#include <mars/errors.hpp>

#include "conformance.hpp"
#include "fake.hpp"
#include "loops.hpp"

namespace {

using Json = nlohmann::json;

std::unique_ptr<mars::Sequence> row_of(std::int64_t index, const Json& wanted) {
    mars::GenerationConfig config;
    config.tau = wanted["taus"][0];
    config.max_new_tokens = wanted["max_new_tokens"];
    config.masks = optional_of<std::int64_t>(wanted["masks"]).value_or(mars::all_masks); // null is the all masks
    config.eos_ids = wanted["eos_ids"].get<fake::Tokens>();
    const auto stop = optional_of<std::int64_t>(wanted["stop_token"]);
    return std::make_unique<mars::Sequence>(index, wanted["prompt"].get<fake::Tokens>(), config, fake::Tokens{},
                                            [stop](std::int64_t token) { return token == stop; });
}

} // namespace

TEST_CASE("every case of loops.json") {
    for (const auto& each : conformance("loops.json")) {
        CAPTURE(each["name"].get<std::string>());
        fake::Backend backend(fake::hashed, each["max_capacity"], optional_of<std::int64_t>(each["max_slots"]));
        std::vector<std::unique_ptr<mars::Sequence>> rows;
        std::vector<mars::Sequence*> pointers;
        for (const Json& wanted : each["rows"]) {
            rows.push_back(row_of(static_cast<std::int64_t>(rows.size()), wanted));
            pointers.push_back(rows.back().get());
        }
        std::vector<std::vector<fake::Tokens>> runs(rows.size());
        const auto loop = loops::decode(backend, pointers, each["block"], fake::mask, each["cache_block"]);
        while (const auto accepted = loop->next())
            for (const mars::Accepted& event : *accepted) {
                const auto i = static_cast<std::size_t>(event.seq);
                runs[i].push_back(event.token_ids);
                const Json& taus = each["rows"][i]["taus"];
                rows[i]->set_tau(taus[std::min(runs[i].size(), taus.size() - 1)]);
            }
        for (std::size_t i = 0; i < rows.size(); ++i) {
            const Json& expected = each["rows"][i]["expected"];
            CAPTURE(i);
            CHECK(runs[i] == expected["runs"].get<std::vector<fake::Tokens>>());
            CHECK(to_string(*rows[i]->finish_reason) == expected["finish_reason"].get<std::string>());
            CHECK(rows[i]->stats.forwards == expected["forwards"].get<std::int64_t>());
            CHECK(rows[i]->stats.prefill_forwards == expected["prefill_forwards"].get<std::int64_t>());
        }
    }
}

TEST_CASE("a cancelled row ends before its next step, and the others continue") {
    for (const std::int64_t cache_block : {1, 8}) {
        CAPTURE(cache_block);
        fake::Backend backend;
        mars::GenerationConfig config;
        config.max_new_tokens = 20;
        config.tau = 0.95;
        mars::Sequence one(0, {1, 2, 3}, config, {}), two(1, {4}, config, {}), three(2, fake::Tokens(700, 5), config, {});
        const auto loop = loops::decode(backend, {&one, &two, &three}, 4, fake::mask, cache_block);
        REQUIRE(loop->next());
        one.cancel();
        three.cancel(); // in or before its prefill
        while (loop->next()) {
        }
        CHECK(one.finish_reason == mars::FinishReason::cancelled);
        CHECK(three.finish_reason == mars::FinishReason::cancelled);
        CHECK(three.stats.tokens == 0);
        CHECK(two.finish_reason == mars::FinishReason::length);
        CHECK(two.stats.tokens == 20);
    }
}

TEST_CASE("a cache block larger than a step is refused") {
    fake::Backend backend(fake::hashed, 1000, 16);
    mars::Sequence row(0, {1}, {}, {});
    CHECK_THROWS_WITH_AS(loops::decode(backend, {&row}, 4, fake::mask, 17),
                         "a cache block of 17 tokens does not fit a step of 16 slots; give a smaller one", mars::SessionError);
    CHECK(loops::decode(backend, {&row}, 4, fake::mask, 16)->next());
}

TEST_CASE("capacities grow by a quarter, in multiples of 128") {
    CHECK(mars::bucket(1, 0) == 128);
    CHECK(mars::bucket(129, 128) == 256);
    CHECK(mars::bucket(1025, 1024) == 1280);
}
