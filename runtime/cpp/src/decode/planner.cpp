// The same order of operations as in Python, so that doubles are rounded alike.
#include "decode/planner.hpp"

#include <algorithm>

namespace mars {

namespace {

constexpr std::int64_t prompt_masks = 3; // of a prompt at least: their confidences show whether the text is predictable

bool is_free(const Sequence& seq) { return seq.config().masks == auto_masks; }

} // namespace

std::vector<StepPlan> StepPlanner::plans(const std::vector<Sequence*>& seqs, const std::vector<std::int64_t>& rooms) {
    std::vector<StepPlan> plans;
    std::vector<std::size_t> with_tau, exact;
    for (std::size_t i = 0; i < seqs.size(); ++i) {
        const bool is_exact = seqs[i]->config().is_exact(), is_split = is_exact && is_free(*seqs[i]);
        plans.push_back(is_split ? StepPlan{seqs[i]->num_pending()} : seqs[i]->widest_plan(rooms[i]));
        if (!is_exact) with_tau.push_back(i);
        if (is_split) exact.push_back(i);
    }
    if (std::any_of(with_tau.begin(), with_tau.end(), [&](std::size_t i) { return plans[i].masks > 0 && is_free(*seqs[i]); })) {
        std::vector<Sequence*> choosers;
        std::vector<std::int64_t> most;
        for (const std::size_t i : with_tau) {
            choosers.push_back(seqs[i]);
            most.push_back(plans[i].masks);
        }
        const std::vector<std::int64_t> masks = tau_planner_.choose(*learned_cost->cost(), choosers, most);
        for (std::size_t i = 0; i < with_tau.size(); ++i) plans[with_tau[i]].masks = masks[i];
    }
    if (exact.empty()) return plans;
    std::vector<StepForecast> forecasts;
    std::int64_t floor = 0;
    for (std::size_t i = 0; i < seqs.size(); ++i) {
        if (std::find(exact.begin(), exact.end(), i) != exact.end())
            forecasts.push_back(seqs[i]->forecast(rooms[i]));
        else
            floor = std::max(floor, plans[i].slots());
    }
    const auto others = static_cast<std::int64_t>(seqs.size() - exact.size());
    const std::vector<StepPlan> split = exact_planner_.choose(*learned_cost->cost(), forecasts, others, floor);
    for (std::size_t i = 0; i < exact.size(); ++i) {
        StepPlan& plan = plans[exact[i]];
        plan = split[i];
        plan.masks = std::min(plan.masks, seqs[exact[i]]->usable_masks(plan.draft_tokens));
    }
    return plans;
}

StepPlan StepPlanner::prompt_plan(const Sequence& seq, std::int64_t room, std::int64_t num) const {
    StepPlan plan = seq.widest_plan(room);
    if (!seq.config().is_exact() || !is_free(seq)) return plan;
    const std::shared_ptr<const Cost> cost = learned_cost->cost();
    const std::vector<double> expected = seq.expected_of_prompt(plan.masks);
    const auto count = static_cast<double>(num), pending = static_cast<double>(plan.pending);
    const double chunk = cost->of(pending), one = cost->of(count);
    const auto value = [&](std::int64_t masks) {
        const auto m = static_cast<double>(masks);
        const double seconds = cost->of(pending + m) - chunk + (cost->of(count * (1.0 + m)) - one) / count;
        return expected[static_cast<std::size_t>(masks)] - count / one * seconds;
    };
    std::int64_t best = std::min(prompt_masks, plan.masks);
    for (std::int64_t masks = best + 1; masks <= plan.masks; ++masks)
        if (value(masks) > value(best)) best = masks;
    plan.masks = best;
    return plan;
}

std::vector<std::int64_t> TauPlanner::choose(const Cost& cost, const std::vector<Sequence*>& seqs, const std::vector<std::int64_t>& most) {
    std::int64_t widest = 0;
    for (std::size_t i = 0; i < seqs.size(); ++i)
        if (is_free(*seqs[i])) widest = std::max(widest, most[i]);
    std::vector<std::vector<double>> expected;
    for (std::size_t i = 0; i < seqs.size(); ++i) expected.push_back(seqs[i]->pass_rates.expected(most[i]));
    const auto count = static_cast<double>(seqs.size());
    const auto fed = [&](std::size_t i, std::int64_t masks) { return is_free(*seqs[i]) ? std::min(masks, most[i]) : most[i]; };
    const auto rate = [&](std::int64_t masks) { // each sequence feeds its expected tokens and its masks
        double total = 0.0, slots = 0.0;
        for (std::size_t i = 0; i < seqs.size(); ++i) {
            const std::int64_t own = fed(i, masks);
            const double tokens = expected[i][static_cast<std::size_t>(own)];
            total += tokens;
            slots = std::max(slots, tokens + static_cast<double>(own));
        }
        return total / cost.of(count * slots);
    };
    const auto seconds = [&](std::int64_t masks) {
        std::int64_t slots = 0;
        for (std::size_t i = 0; i < seqs.size(); ++i) slots = std::max(slots, seqs[i]->num_pending() + fed(i, masks));
        return cost.of(count * static_cast<double>(slots));
    };
    std::int64_t best = 0;
    double fastest = 0.0;
    for (std::int64_t masks = 0; masks <= widest; ++masks)
        if (const double reached = rate(masks); reached >= fastest) {
            fastest = reached;
            best = masks;
        }
    double certainty = 0.0;
    for (const Sequence* seq : seqs) certainty += seq->pass_rates.certainty();
    trial_budget_.add(certainty / count * seconds(best), seconds(widest));
    const std::int64_t trial = std::min(2 * best + 1, widest);
    double tokens = 0.0;
    for (std::size_t i = 0; i < seqs.size(); ++i) tokens += expected[i][static_cast<std::size_t>(fed(i, trial))];
    if (trial > best && trial_budget_.pays(tokens * (1.0 / rate(trial) - 1.0 / rate(best)))) best = trial;
    std::vector<std::int64_t> made;
    for (std::size_t i = 0; i < seqs.size(); ++i) made.push_back(fed(i, best));
    return made;
}

} // namespace mars
