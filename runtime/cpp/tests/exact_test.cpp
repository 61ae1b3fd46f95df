// Exact mode: tests/conformance/exact.json and splits.json exactly, and the one-token text whatever is proposed.

#include "conformance.hpp"
#include "fake.hpp"
#include "loops.hpp"

namespace {

using Json = nlohmann::json;
using Rows = std::vector<std::unique_ptr<mars::Sequence>>;

std::unique_ptr<mars::Sequence> exact_row(std::int64_t index, const Json& wanted) {
    mars::GenerationConfig config;
    config.max_new_tokens = wanted["max_new_tokens"];
    config.masks = wanted["masks"] == "full" ? mars::all_masks : wanted["masks"].get<std::int64_t>();
    config.eos_ids = wanted["eos_ids"].get<fake::Tokens>();
    const auto stop = optional_of<std::int64_t>(wanted["stop_token"]);
    return std::make_unique<mars::Sequence>(index, wanted["prompt"].get<fake::Tokens>(), config, fake::Tokens{},
                                            [stop](std::int64_t token) { return token == stop; });
}

/// Known, proposed and masked slots of a step of one row.
fake::Tokens fed_in(const mars::StepInput& step) {
    const std::int64_t known = step.output_index.front() + 1;
    const auto masks = std::count(step.input_ids.begin(), step.input_ids.end(), fake::mask);
    return {known, step.slots - known - masks, masks};
}

void run(mars::Backend& backend, const std::vector<mars::Sequence*>& rows, std::int64_t block,
         std::optional<mars::StepPlanner> planner = std::nullopt) {
    const auto loop = loops::decode(backend, rows, block, fake::mask, 1, std::move(planner));
    while (loop->next()) {
    }
}

mars::GenerationConfig asking(std::optional<double> tau, std::int64_t masks = mars::all_masks) {
    mars::GenerationConfig config;
    config.tau = tau;
    config.max_new_tokens = 40;
    config.masks = masks;
    return config;
}

/// A model whose next token depends on the last three alone, and that masks predict rightly two times in three, with a confidence that
/// is half a lie.
std::pair<std::int64_t, float> guessing(const fake::Tokens& known, std::int64_t masks) {
    fake::Tokens seen(known.size() < 3 ? known.begin() : known.end() - 3, known.end());
    const auto wrong = fake::hashed(seen, masks + 7).first;
    for (std::int64_t i = 0; i < masks; ++i) {
        seen.push_back(fake::hashed(seen, 0).first);
        if (seen.size() > 3) seen.erase(seen.begin());
    }
    const auto [token, confidence] = fake::hashed(seen, 0);
    return masks > 0 && wrong <= 4 ? std::pair(wrong, confidence / 2) : std::pair(token, 0.5F + confidence / 2);
}

/// Anything: right, wrong, and too much of it.
mars::DraftTokens rumours(fake::Tokens seen) {
    fake::Tokens made;
    for (int i = 0; i < 5; ++i) {
        const std::int64_t right = fake::hashed(seen, 0).first;
        made.push_back(fake::mix(static_cast<std::uint64_t>(seen.size())) % 4 == 0 ? 1 + right % 12 : right);
        seen.push_back(made.back());
    }
    return {made, std::vector<double>(made.size(), 0.99), mars::Source::prompt_lookup};
}

} // namespace

TEST_CASE("every case of exact.json: the same feeds and accepted runs") {
    for (const auto& each : conformance("exact.json")) {
        CAPTURE(each["name"].get<std::string>());
        const auto limit = [&](const char* name) { return optional_of<std::int64_t>(each[name]); };
        Rows together;
        std::vector<mars::Sequence*> pointers;
        for (const Json& wanted : each["rows"]) {
            CAPTURE(together.size());
            together.push_back(exact_row(static_cast<std::int64_t>(together.size()), wanted));
            pointers.push_back(together.back().get());
            fake::Backend backend(fake::hashed, each["max_capacity"], limit("max_slots"), limit("max_outputs"));
            backend.record = true;
            const auto row = exact_row(0, wanted); // alone, so that each forward is this row's
            std::vector<fake::Tokens> runs, fed;
            const auto loop = loops::decode(backend, {row.get()}, each["block"], fake::mask);
            while (const auto accepted = loop->next())
                for (const mars::Accepted& event : *accepted) runs.push_back(event.token_ids);
            for (auto i = static_cast<std::size_t>(row->stats.prefill_forwards); i < backend.steps.size(); ++i)
                fed.push_back(fed_in(backend.steps[i]));
            const Json& expected = wanted["expected"];
            CHECK(runs == expected["runs"].get<std::vector<fake::Tokens>>());
            CHECK(fed == expected["fed"].get<std::vector<fake::Tokens>>());
            CHECK(to_string(*row->finish_reason) == expected["finish_reason"].get<std::string>());
            CHECK(row->stats.draft_tokens == expected["draft_tokens"].get<std::int64_t>());
            CHECK(row->stats.accepted_draft_tokens == expected["accepted_draft_tokens"].get<std::int64_t>());
        }
        fake::Backend backend(fake::hashed, each["max_capacity"], limit("max_slots"), limit("max_outputs"));
        run(backend, pointers, each["block"]);
        for (std::size_t i = 0; i < together.size(); ++i) {
            const Json& wanted = each["rows"][i];
            auto answer = wanted["prompt"].get<fake::Tokens>();
            for (const Json& part : wanted["expected"]["runs"])
                for (const Json& token : part) answer.push_back(token);
            CHECK(together[i]->tokens == answer);
        }
    }
}

TEST_CASE("every case of splits.json") {
    for (const auto& each : conformance("splits.json")) {
        CAPTURE(each["name"].get<std::string>());
        const mars::Cost cost(each["cost"].get<std::vector<std::pair<std::int64_t, double>>>());
        mars::ExactPlanner exact_planner;
        for (const Json& step : each["steps"]) {
            std::vector<mars::StepForecast> rows;
            for (const Json& row : step["rows"])
                rows.push_back({row["pending"], row["probabilities"], optional_of<double>(row["ending"]), row["expected"], row["room"]});
            std::vector<fake::Tokens> plans;
            for (const mars::StepPlan& plan : exact_planner.choose(cost, rows, each["others"], each["floor"]))
                plans.push_back({plan.pending, plan.draft_tokens, plan.masks});
            CHECK(plans == step["feeds"].get<std::vector<fake::Tokens>>());
        }
    }
}

TEST_CASE("a stop string within verified draft tokens counts all that stay") {
    mars::Sequence row(0, {1}, {}, {}, [](std::int64_t token) { return token == 6; });
    row.cursor = 1;
    row.draft_tokens = {{5, 6, 7}, {0.9, 0.9, 0.9}};
    mars::Predictions predictions{{5, 6, 7, 8}, {1.0, 1.0, 1.0, 1.0}, {1.0, 1.0, 1.0, 1.0}, {}};
    const std::optional<mars::Accepted> event = row.accept(predictions, 3);
    REQUIRE(event);
    CHECK(event->token_ids == fake::Tokens{5, 6});
    CHECK(event->accepted_draft_tokens == 2);
    CHECK(row.stats.accepted_draft_tokens == 2);
    CHECK(row.cursor == 2); // the last token is not final
}

TEST_CASE("exact rows give the one-token text with any number of masks, lookup, draft tokens and neighbors") {
    const mars::Cost known(std::vector<std::pair<std::int64_t, double>>{{1, 1.0}, {8, 1.4}, {64, 9.0}});
    mars::LearnedCost cost(known);
    cost.fix(known);
    for (std::int64_t seed = 1; seed < 9; ++seed)
        for (const std::int64_t masks : {mars::auto_masks, mars::all_masks, std::int64_t{2}}) {
            CAPTURE(seed);
            CAPTURE(masks);
            fake::Backend backend(guessing);
            const fake::Tokens prompt(static_cast<std::size_t>(seed), seed), eos{12};
            mars::Sequence one(0, prompt, asking(1.0), eos), exact(0, prompt, asking({}, masks), eos);
            mars::Sequence rumoured(1, prompt, asking({}, masks), eos);
            mars::GenerationConfig looking = asking({}, masks);
            looking.prompt_lookup = 1;
            mars::Sequence copied(2, prompt, looking, eos), fast(3, prompt, asking(0.3, masks), eos);
            run(backend, {&one}, 4);
            const auto loop = loops::decode(backend, {&exact, &rumoured, &copied, &fast}, 4, fake::mask, 1, mars::StepPlanner(cost));
            while (loop->next()) rumoured.draft_tokens = rumours(rumoured.tokens);
            for (const mars::Sequence* row : {&exact, &rumoured, &copied}) {
                CHECK(row->tokens == one.tokens);
                CHECK(row->finish_reason == one.finish_reason);
                CHECK(row->stats.draft_tokens >= row->stats.accepted_draft_tokens);
                CHECK(row->stats.forwards <= one.stats.forwards);
            }
        }
}

TEST_CASE("draft tokens save forwards") {
    fake::Backend backend(guessing), blind([](const fake::Tokens& known, std::int64_t masks) {
        return masks > 0 ? std::pair(std::int64_t{13}, 0.01F) : fake::hashed(known, 0);
    });
    mars::Sequence exact(0, {1, 2}, asking({}), {}), alone(0, {1, 2}, asking({}), {});
    run(backend, {&exact}, 4);
    CHECK(exact.stats.forwards < 36);
    CHECK(exact.stats.accepted_draft_tokens == exact.stats.tokens - exact.stats.forwards);
    CHECK(exact.stats.rejected_draft_tokens() > 0);
    run(blind, {&alone}, 4);
    CHECK(alone.stats.forwards > 30);
}

TEST_CASE("exact mode after a tau keeps the masks that the user chose, not those that came with the tau") {
    const mars::GenerationConfig asked = asking(0.6, mars::all_masks), seeded = asking(0.6, mars::auto_masks).repeatable(false, true);
    for (const mars::GenerationConfig& config : {asked, seeded, asking({}).with_profile(asked)}) {
        mars::Sequence row(0, {1}, config, {});
        CHECK(row.config().masks == mars::all_masks);
        row.set_exact(true);
        row.refresh();
        CHECK(row.config().masks == (config.masks_of_tau ? mars::auto_masks : mars::all_masks));
        row.set_tau(0.6);
        row.refresh();
        CHECK(row.config().masks == (config.masks_of_tau ? mars::auto_masks : mars::all_masks));
    }
}

TEST_CASE("lookup proposes copies of repeated text") {
    fake::Backend blind([](const fake::Tokens& known, std::int64_t masks) {
        return std::pair(masks > 0 ? std::int64_t{13} : 1 + known.back() % 9, 0.01F);
    });
    mars::GenerationConfig looking = asking({});
    looking.prompt_lookup = 2;
    mars::Sequence row(0, {1}, looking, {}), without(0, {1}, asking({}), {});
    run(blind, {&row}, 4);
    run(blind, {&without}, 4);
    CHECK(row.tokens == without.tokens);
    CHECK(without.stats.forwards > 30);
    CHECK(row.stats.forwards < 25);

    fake::Tokens repeated;
    for (int i = 0; i < 400; ++i) repeated.push_back(1 + i % 200);
    mars::PromptLookup prompt_lookup(3);
    CHECK(prompt_lookup.propose(repeated, 1000).size() == 32); // however long the copy is
}

TEST_CASE("exact and tau can change while a row runs") {
    fake::Backend backend(guessing);
    mars::Sequence row(0, {3, 4}, asking({}), {});
    const auto loop = loops::decode(backend, {&row}, 4, fake::mask);
    int exact_steps = 0;
    for (std::size_t before = row.tokens.size(), i = 0; loop->next(); before = row.tokens.size(), ++i) {
        if (row.config().is_exact()) { // as this step saw it
            ++exact_steps;
            fake::Tokens seen(row.tokens.begin(), row.tokens.begin() + static_cast<std::ptrdiff_t>(before));
            while (seen.size() < row.tokens.size()) seen.push_back(guessing(seen, 0).first);
            CHECK(seen == row.tokens);
        }
        if (i % 3 == 0) row.set_tau(0.6);
        if (i % 3 == 1) row.set_exact(true);
    }
    CHECK(exact_steps > 3);
    CHECK(row.stats.tokens == 40);
    CHECK(row.stats.draft_tokens > 0);
}
