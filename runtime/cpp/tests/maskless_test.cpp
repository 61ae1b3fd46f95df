// Bundles without masks, and the most masks of a step.
#include <mars/errors.hpp>

#include "config.hpp"
#include "conformance.hpp"
#include "fake.hpp"
#include "loops.hpp"
#include "manifest.hpp"
#include "session/answers.hpp"

namespace {

using fake::Tokens;
using Json = nlohmann::json;

mars::Session session(const Json& manifest, std::unique_ptr<mars::Backend> backend) {
    mars::Session opened = mars::Opened::over({"nowhere", mars::parse_manifest(manifest.dump())}, std::move(backend));
    opened.set_cost({{1, 1.0}});
    return opened;
}

} // namespace

TEST_CASE("no step has more masks than the bundle allows") {
    for (const std::int64_t most : {0, 1, 3}) {
        fake::Backend backend;
        backend.record = true;
        mars::Sequence row(0, {4, 1}, config_of({}), {});
        row.mask_limit = most;
        for (const auto loop = loops::decode(backend, {&row}, 4, fake::mask); loop->next();) {
        }
        std::int64_t masks = 0;
        for (const mars::StepInput& step : backend.steps)
            masks = std::max<std::int64_t>(masks, std::count(step.input_ids.begin(), step.input_ids.end(), fake::mask));
        CHECK(masks == most);
    }
}

TEST_CASE("a bundle without masks: exact mode with lookup, and every token is allowed in a prompt") {
    Json manifest = valid();
    manifest["tokens"]["mask"] = nullptr;
    manifest["masks"] = 0;
    const auto repeating = [](const Tokens& known, std::int64_t masks) {
        return std::pair(masks > 0 ? std::int64_t{13} : 3 + known.back() % 5, 0.5F);
    };
    const mars::Session opened = session(manifest, std::make_unique<fake::Backend>(repeating, 64));
    mars::GenerationConfig exact = config_of({}), looking = exact;
    looking.prompt_lookup = 1;
    const mars::Completion one = opened.generate(Tokens{4, 19}, config_of(1.0)), plain = opened.generate(Tokens{4, 19}, exact),
                           copied = opened.generate(Tokens{4, 19}, looking);
    CHECK(plain.token_ids == one.token_ids);
    CHECK(copied.token_ids == one.token_ids);
    CHECK(plain.stats.forwards == one.stats.forwards);
    CHECK(copied.stats.forwards < one.stats.forwards);
    CHECK(says(message_of([&] { opened.check(config_of(0.5)); }), "exported without masks"));
}
