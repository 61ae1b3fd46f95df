// Draws and choices against tests/conformance/uniform.json and choices.json; settings out of range.
#include <cmath>
#include <limits>
#include <tuple>

#include <mars/errors.hpp>

#include "conformance.hpp"
#include "decode/sample.hpp"

TEST_CASE("sampled or seeded requests do not depend on measured costs") {
    mars::GenerationConfig config;
    const auto masks = [&](bool has_masks, bool has_seed) { return config.repeatable(has_masks, has_seed).masks; };
    CHECK(masks(false, true) == mars::auto_masks); // exact mode does not depend on the number of masks
    config.tau = 0.5;
    CHECK(masks(false, false) == mars::auto_masks);
    CHECK(masks(false, true) == mars::all_masks);
    CHECK(masks(true, true) == mars::auto_masks);
    config.temperature = 0.7;
    CHECK(masks(false, false) == mars::all_masks);
    CHECK(masks(true, false) == mars::auto_masks);
    config.tau = 1.0; // one token at a time
    CHECK(masks(false, true) == mars::auto_masks);
    config.tau.reset();
    config.exact = false; // the usual tau
    CHECK(masks(false, false) == mars::all_masks);
    CHECK(config.repeatable(false, true).tau == std::nullopt);
    CHECK(config.repeatable(false, true).masks_of_tau);
    CHECK_FALSE(config.repeatable(true, true).masks_of_tau);
    config.masks = 3; // of a profile
    CHECK(masks(false, true) == 3);
}

TEST_CASE("every case of uniform.json") {
    for (const auto& each : conformance("uniform.json")) {
        const std::uint64_t seed = std::stoull(each["seed"].get<std::string>());
        CHECK(mars::uniform(seed, each["position"]) == each["numerator"].get<double>() / 9007199254740992.0);
    }
}

TEST_CASE("every case of choices.json") {
    for (const auto& each : conformance("choices.json")) {
        CAPTURE(each.dump());
        mars::GenerationConfig config;
        config.temperature = each["temperature"];
        config.top_k = each["top_k"];
        config.top_p = each["top_p"];
        config.repetition_penalty = each["repetition_penalty"];
        config.metric = metric_of(each["metric"]);
        config.seed = each["seed"];
        const auto logits = each["logits"].get<std::vector<float>>();
        const auto made = mars::choose(logits.data(), static_cast<std::int64_t>(logits.size()), config, each["seen"], each["position"]);
        CHECK(made.token == each["token"].get<std::int64_t>());
        CHECK(std::abs(made.confidence - each["confidence"].get<double>()) < 1e-6);
    }
}

TEST_CASE("logits that are not numbers are refused, however a token is chosen") {
    const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
    for (const double temperature : {0.0, 1.0})
        for (const auto& [top_k, top_p, min_p] : {std::tuple(0, 1.0, 0.0), {3, 1.0, 0.0}, {0, 0.5, 0.0}, {0, 1.0, 0.05}, {0, 0.9, 1.0}})
            for (std::size_t at = 0; at < 20; ++at)
                for (const float wrong : {nan, infinity, -infinity}) {
                    std::vector<float> logits(20, 1.0F);
                    logits[7] = 9;
                    logits[at] = wrong;
                    mars::GenerationConfig config;
                    config.temperature = temperature;
                    config.top_k = top_k;
                    config.top_p = top_p;
                    config.min_p = min_p;
                    const auto token = [&] { return mars::choose(logits.data(), 20, config, {}, 3).token; };
                    if (wrong == -infinity) // a token that cannot be
                        CHECK(token() != static_cast<std::int64_t>(at));
                    else
                        CHECK_THROWS_WITH_AS(token(), doctest::Contains("not numbers"), mars::DeviceError);
                }
    mars::GenerationConfig config;
    const std::vector<float> none(20, -infinity);
    CHECK_THROWS_AS(mars::choose(none.data(), 20, config, {}, 3), mars::DeviceError);
}

TEST_CASE("draws cover the whole distribution, including unlikely and equally likely tokens") {
    const std::vector<float> logits{0, 0, -1, -50};
    mars::GenerationConfig config;
    config.temperature = 1;
    std::vector<int> counts(4);
    for (config.seed = 0; config.seed < 2000; ++config.seed)
        ++counts[static_cast<std::size_t>(mars::choose(logits.data(), 4, config, {}, 0).token)];
    CHECK(std::abs(counts[0] - 844) < 90);
    CHECK(std::abs(counts[1] - 844) < 90);
    CHECK(std::abs(counts[2] - 311) < 70);
    CHECK(counts[3] == 0);
}

TEST_CASE("tokens and confidences are valid for every allowed setting") {
    const std::vector<float> logits{3, 0, -1, -1e9F, 2};
    const std::vector<std::int64_t> seen{0, 1, 2, 3};
    const double least = std::numeric_limits<double>::denorm_min(), most = std::numeric_limits<double>::max();
    for (const double temperature : {0.0, least, 1e-300, 1.0, most})
        for (const double penalty : {least, 1e-300, 0.5, 1.0, 1e39, most})
            for (const auto metric : {mars::Metric::probability, mars::Metric::margin, mars::Metric::entropy}) {
                mars::GenerationConfig config;
                config.temperature = temperature;
                config.repetition_penalty = penalty;
                config.metric = metric;
                config.min_p = 0.1;
                config.top_p = 0.9;
                config.check();
                const auto made = mars::choose(logits.data(), 5, config, seen, 7);
                CAPTURE(temperature);
                CAPTURE(penalty);
                CHECK(std::isfinite(made.confidence));
                if (temperature > 0 && temperature < 1) CHECK(made.token == (penalty > 1 ? 4 : 0)); // as good as greedy
            }
}

TEST_CASE("every value out of range is named") {
    mars::GenerationConfig config;
    config.tau = std::nan("");
    config.max_new_tokens = 0;
    config.masks = -3;
    config.eos_ids = std::vector<std::int64_t>{-1};
    config.stop = {""};
    config.temperature = -1;
    config.top_k = -1;
    config.top_p = 0;
    config.repetition_penalty = 0;
    try {
        config.check();
        FAIL("accepted");
    } catch (const mars::SessionError& error) {
        for (const char* name :
             {"tau", "max_new_tokens", "masks", "eos_ids", "stop", "temperature", "top_k", "top_p", "repetition_penalty"})
            CHECK_MESSAGE(std::string(error.what()).find(std::string(name) + " must be ") != std::string::npos, name);
    }
    CHECK_NOTHROW(mars::GenerationConfig{}.check());
}

TEST_CASE("exact is the default, a tau turns it off, and both together are refused") {
    mars::GenerationConfig config;
    CHECK(config.is_exact());
    CHECK_FALSE(config.one_token());
    config.exact = false;
    CHECK(config.bound() == 0.95);
    config = {};
    config.tau = 1;
    CHECK_FALSE(config.is_exact());
    CHECK(config.one_token());
    config.exact = true;
    CHECK_THROWS_WITH_AS(config.check(),
                         "exact and tau exclude each other: exact verifies every token, tau 1 accepts "
                         "likely tokens without verification; give one of them",
                         mars::SessionError);
    config = {};
    config.prompt_lookup = 2;
    CHECK_NOTHROW(config.check());
    config.tau = 0.9; // would not use it
    CHECK_THROWS_WITH_AS(config.check(), doctest::Contains("prompt_lookup works in exact mode only"), mars::SessionError);
}
