// Calls that read well: settings named in the call, prompts in braces. C++20, as docs/cpp.md shows it.
#include <doctest/doctest.h>

#include <mars/session.hpp>

#include "fake.hpp"
#include "manifest.hpp"
#include "session/answers.hpp"

TEST_CASE("settings can be named in the call") {
    const mars::Session session =
        mars::Opened::over({"nowhere", mars::parse_manifest(valid().dump())}, std::make_unique<fake::Backend>(fake::hashed, 64));
    const auto done =
        session.generate({1, 2, 3}, {.tau = 0.8, .max_new_tokens = 5, .masks = mars::all_masks, .eos_ids = std::vector<std::int64_t>()});
    CHECK(done.token_ids.size() == 5);
    mars::GenerationConfig config;
    config.tau = 0.8;
    config.max_new_tokens = 5;
    config.masks = mars::all_masks;
    config.eos_ids.emplace();
    CHECK(session.generate(std::vector<std::int64_t>{1, 2, 3}, config).token_ids == done.token_ids);
    CHECK_THROWS_WITH_AS(mars::Session::open("nowhere", {.device = "cpu", .threads = 2}), doctest::Contains("nowhere"), mars::BundleError);
}
