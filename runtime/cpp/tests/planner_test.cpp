// Automatic windows: tests/conformance/masks.json, costs.json, rates.json and prompts.json exactly, the cost table, and a loop that uses both.
#include <algorithm>

#include <mars/errors.hpp>

#include "conformance.hpp"
#include "decode/planner.hpp"
#include "fake.hpp"
#include "loops.hpp"

namespace {

using Points = std::vector<std::pair<std::int64_t, double>>;

} // namespace

TEST_CASE("every case of masks.json") {
    for (const auto& each : conformance("masks.json")) {
        CAPTURE(each["name"].get<std::string>());
        const mars::Cost cost(each["cost"].get<Points>());
        mars::TauPlanner planner;
        std::vector<std::unique_ptr<mars::Sequence>> rows;
        std::vector<mars::Sequence*> pointers;
        std::vector<std::int64_t> most;
        for (const auto& row : each["rows"]) {
            mars::GenerationConfig config;
            config.masks = row["is_free"] ? mars::auto_masks : mars::all_masks;
            rows.push_back(std::make_unique<mars::Sequence>(0, fake::Tokens{1}, config, fake::Tokens{}));
            pointers.push_back(rows.back().get());
            most.push_back(row["most"]);
        }
        for (std::size_t step = 0; step < each["steps"].get<std::size_t>(); ++step) {
            CAPTURE(step);
            const std::vector<std::int64_t> masks = planner.choose(cost, pointers, most);
            REQUIRE(masks == each["masks"][step].get<std::vector<std::int64_t>>());
            for (std::size_t i = 0; i < rows.size(); ++i) {
                const auto script = each["rows"][i]["passed"][step].get<std::string>().substr(0, static_cast<std::size_t>(masks[i]) + 1);
                std::vector<bool> passed;
                for (const char mark : script) passed.push_back(mark == '1');
                const auto missed = std::find(script.begin() + 1, script.end(), '0');
                const std::int64_t accepted = missed - script.begin();
                rows[i]->tokens.assign(static_cast<std::size_t>(accepted), 1); // pending
                rows[i]->pass_rates.record(accepted, passed);
            }
        }
    }
}

TEST_CASE("a cost table is linear between its points and never decreases") {
    const mars::Cost cost({{1, 10.0}, {2, 9.0}, {4, 20.0}, {8, 40.0}});
    CHECK(cost.of(0.5) == 9.0);
    CHECK(cost.of(2) == 9.0);
    CHECK(cost.of(3) == 14.5);
    CHECK(cost.of(16) == 80.0);
    for (const Points& wrong : {Points{}, Points{{0, 1.0}}, Points{{2, 1.0}, {1, 2.0}}, Points{{1, 0.0}}, Points{{1, 0.0 / 0.0}}})
        CHECK_THROWS_AS(mars::Cost{wrong}, mars::SessionError);
}

TEST_CASE("every case of costs.json") {
    for (const auto& each : conformance("costs.json")) {
        CAPTURE(each["name"].get<std::string>());
        mars::LearnedCost cost(mars::Cost(each["curve"].get<Points>()));
        for (const auto& step : each["steps"]) cost.record(step[0], step[1], step[2]);
        std::vector<double> table;
        for (const auto& [positions, seconds] : cost.cost()->points()) table.push_back(seconds);
        REQUIRE(table == each["table"].get<std::vector<double>>());
    }
}

TEST_CASE("every case of rates.json") {
    for (const auto& each : conformance("rates.json")) {
        CAPTURE(each["name"].get<std::string>());
        mars::AcceptanceRates rates;
        for (const auto& step : each["steps"]) {
            const auto source = step[0].get<bool>() ? mars::Source::prompt_lookup : mars::Source::masks;
            const auto confidences = step[1].get<std::vector<double>>();
            rates.record({fake::Tokens(confidences.size(), 1), confidences, source, step[2].get<fake::Tokens>()},
                         step[3].get<fake::Tokens>());
        }
        for (const auto source : {mars::Source::masks, mars::Source::prompt_lookup}) {
            std::vector<double> table;
            for (const double claim : each["claims"]) table.push_back(rates.probability(source, claim));
            REQUIRE(table == each["table"][static_cast<std::size_t>(source)].get<std::vector<double>>());
        }
    }
}

TEST_CASE("every case of prompts.json") {
    for (const auto& each : conformance("prompts.json")) {
        CAPTURE(each["name"].get<std::string>());
        const mars::Cost table(each["cost"].get<Points>());
        mars::LearnedCost cost(table);
        cost.fix(table);
        const mars::StepPlanner planner(cost);
        const auto rates = std::make_shared<mars::AcceptanceRates>();
        for (const auto& prompt : each["prompts"]) {
            mars::Sequence seq(0, fake::Tokens(prompt["tokens"].get<std::size_t>(), 1), {}, {}, nullptr, rates);
            seq.block = 8;
            REQUIRE(planner.prompt_plan(seq, prompt["room"], prompt["num"]).masks == prompt["masks"].get<std::int64_t>());
            const auto values = prompt["rates"].get<std::vector<double>>();
            if (!values.empty()) rates->record_prompt(values);
        }
    }
}

TEST_CASE("automatic and fixed numbers of masks in one batch: the same text, and steps of equal cost are full") {
    fake::Backend backend;
    mars::GenerationConfig automatic, fixed;
    fixed.masks = mars::all_masks;
    automatic.max_new_tokens = fixed.max_new_tokens = 30;
    automatic.tau = fixed.tau = 0.5;
    for (const Points& points : {Points{{1, 1.0}}, Points{{1, 1.0}, {2, 3.0}, {64, 90.0}}}) {
        mars::Sequence one(0, {1, 2, 3}, automatic, {}), two(1, {4}, fixed, {}), alone(0, {1, 2, 3}, fixed, {});
        mars::LearnedCost cost{mars::Cost(points)};
        cost.fix(mars::Cost(points));
        const auto loop = loops::decode(backend, {&one, &two}, 8, fake::mask, 1, mars::StepPlanner(cost));
        while (loop->next()) {
        }
        CHECK(one.stats.tokens == 30);
        CHECK(two.stats.tokens == 30);
        const auto full = loops::decode(backend, {&alone}, 8, fake::mask);
        while (full->next()) {
        }
        if (points.size() == 1) CHECK(one.tokens == alone.tokens);
    }
}
