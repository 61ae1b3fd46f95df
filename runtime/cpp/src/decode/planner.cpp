// The same order of operations as in Python, so that doubles are rounded alike.
#include "decode/planner.hpp"

#include <algorithm>

namespace mars {

namespace {

// Share of the time that may be spent on trying more masks than currently pay, if the next token is always certain.
constexpr double trials = 0.015;

bool is_free(const Sequence& seq) { return seq.config().masks == auto_masks; }

} // namespace

std::vector<StepPlan> Planner::plans(const std::vector<Sequence*>& seqs, const std::vector<std::int64_t>& rooms, std::int64_t block) {
    std::vector<StepPlan> plans;
    std::vector<std::size_t> with_tau, exact;
    for (std::size_t i = 0; i < seqs.size(); ++i) {
        plans.push_back(seqs[i]->widest_plan(rooms[i], block));
        if (!seqs[i]->config().is_exact())
            with_tau.push_back(i);
        else if (is_free(*seqs[i]))
            exact.push_back(i);
    }
    std::vector<Sequence*> choosers;
    std::vector<std::int64_t> most;
    for (const std::size_t i : with_tau) {
        choosers.push_back(seqs[i]);
        most.push_back(plans[i].masks);
    }
    const std::vector<std::int64_t> chosen = masks(choosers, most);
    for (std::size_t i = 0; i < with_tau.size(); ++i) plans[with_tau[i]].masks = chosen[i];
    if (exact.empty()) return plans;
    std::vector<Outlook> outlooks;
    std::int64_t floor = 0;
    for (std::size_t i = 0; i < seqs.size(); ++i) {
        if (std::find(exact.begin(), exact.end(), i) != exact.end())
            outlooks.push_back(seqs[i]->outlook(block, rooms[i]));
        else
            floor = std::max(floor, plans[i].slots());
    }
    const auto others = static_cast<std::int64_t>(seqs.size() - exact.size());
    const std::vector<StepPlan> split = exact_planner_.choose(*cost_(), outlooks, others, floor);
    for (std::size_t i = 0; i < exact.size(); ++i) {
        StepPlan& plan = plans[exact[i]];
        plan = split[i];
        plan.masks = std::min(plan.masks, seqs[exact[i]]->usable_masks(plan.draft_tokens));
    }
    return plans;
}

std::vector<std::int64_t> Planner::masks(const std::vector<Sequence*>& seqs, const std::vector<std::int64_t>& most) {
    std::int64_t widest = 0;
    for (std::size_t i = 0; i < seqs.size(); ++i)
        if (is_free(*seqs[i])) widest = std::max(widest, most[i]);
    if (widest == 0) return most;
    std::vector<std::vector<double>> expected;
    for (std::size_t i = 0; i < seqs.size(); ++i) expected.push_back(seqs[i]->pass_rates.expected(most[i]));
    const auto cost = cost_();
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
        return total / cost->of(count * slots);
    };
    const auto seconds = [&](std::int64_t masks) {
        std::int64_t slots = 0;
        for (std::size_t i = 0; i < seqs.size(); ++i) slots = std::max(slots, seqs[i]->num_pending() + fed(i, masks));
        return cost->of(count * static_cast<double>(slots));
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
    saved_ = std::min(saved_ + trials * (certainty / count) * seconds(best), seconds(widest));
    const std::int64_t trial = std::min(2 * best + 1, widest);
    double tokens = 0.0;
    for (std::size_t i = 0; i < seqs.size(); ++i) tokens += expected[i][static_cast<std::size_t>(fed(i, trial))];
    const double lost = tokens * (1.0 / rate(trial) - 1.0 / rate(best));
    if (trial > best && lost <= saved_) {
        saved_ -= lost;
        best = trial;
    }
    std::vector<std::int64_t> made;
    for (std::size_t i = 0; i < seqs.size(); ++i) made.push_back(fed(i, best));
    return made;
}

} // namespace mars
