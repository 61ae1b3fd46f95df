// Same order of operations as runtime/decode/speculation/planner.py, so that doubles are rounded alike.
#include "decode/planner.hpp"

#include <algorithm>

namespace mars {

namespace {

// Share of the time that may be spent on trying more masks than currently pay, if the next token is always certain.
constexpr double trials = 0.015;

std::int64_t fed(const Chooser& seq, std::int64_t masks) { return seq.is_free ? std::min(masks, seq.most) : seq.most; }

} // namespace

std::vector<StepPlan> Planner::plans(const std::vector<Sequence*>& seqs, const std::vector<std::int64_t>& rooms, std::int64_t block) {
    std::vector<StepPlan> plans = widest_plans(seqs, rooms, block);
    std::vector<std::size_t> by_tau, free;
    std::vector<Chooser> choosers;
    std::vector<Outlook> outlooks;
    std::int64_t others = 0, floor = 0;
    for (std::size_t i = 0; i < seqs.size(); ++i) {
        const Sequence& seq = *seqs[i];
        if (seq.config().is_exact()) continue;
        by_tau.push_back(i);
        choosers.push_back({&seq.pass_rates, plans[i].pending, plans[i].masks, seq.config().masks == auto_masks});
    }
    const std::vector<std::int64_t> chosen = masks(choosers);
    for (std::size_t i = 0; i < by_tau.size(); ++i) plans[by_tau[i]].masks = chosen[i];
    for (std::size_t i = 0; i < seqs.size(); ++i) {
        if (seqs[i]->config().is_exact() && seqs[i]->config().masks == auto_masks) {
            free.push_back(i);
            outlooks.push_back(seqs[i]->outlook(block, rooms[i]));
        } else {
            ++others;
            floor = std::max(floor, plans[i].slots());
        }
    }
    if (free.empty()) return plans;
    const std::vector<StepPlan> split = exact_planner_.choose(*cost_(), outlooks, others, floor);
    for (std::size_t i = 0; i < free.size(); ++i) {
        StepPlan& plan = plans[free[i]];
        plan = split[i];
        // Do not feed masks whose draft tokens could no longer be used.
        plan.masks = std::min(plan.masks, std::max(std::int64_t{0}, seqs[free[i]]->remaining() - plan.draft_tokens - 2));
    }
    return plans;
}

std::vector<std::int64_t> Planner::masks(const std::vector<Chooser>& seqs) {
    std::int64_t widest = 0;
    std::vector<std::vector<double>> expected;
    for (const Chooser& seq : seqs) {
        if (seq.is_free) widest = std::max(widest, seq.most);
        expected.push_back(seq.pass_rates->expected(seq.most));
    }
    const auto cost = widest > 0 ? cost_() : nullptr;
    const auto count = static_cast<double>(seqs.size());
    const auto rate = [&](std::int64_t masks) {
        // Each sequence will feed the tokens it is expected to accept in its next step, so they determine the cost, not the
        // currently pending ones.
        double total = 0.0, slots = 0.0;
        for (std::size_t i = 0; i < seqs.size(); ++i) {
            const std::int64_t own = fed(seqs[i], masks);
            const double tokens = expected[i][static_cast<std::size_t>(own)];
            total += tokens;
            slots = std::max(slots, tokens + static_cast<double>(own));
        }
        return total / cost->of(count * slots);
    };
    const auto seconds = [&](std::int64_t masks) {
        std::int64_t slots = 0;
        for (const Chooser& seq : seqs) slots = std::max(slots, seq.pending + fed(seq, masks));
        return cost->of(count * static_cast<double>(slots));
    };
    std::int64_t best = 0;
    if (widest > 0) {
        double fastest = 0.0;
        for (std::int64_t masks = 0; masks <= widest; ++masks)
            if (const double reached = rate(masks); reached >= fastest) {
                fastest = reached;
                best = masks;
            }
        double certainty = 0.0;
        for (const Chooser& seq : seqs) certainty += seq.pass_rates->certainty();
        saved_ = std::min(saved_ + trials * (certainty / count) * seconds(best), seconds(widest));
        const std::int64_t trial = std::min(2 * best + 1, widest);
        double tokens = 0.0;
        for (std::size_t i = 0; i < seqs.size(); ++i) tokens += expected[i][static_cast<std::size_t>(fed(seqs[i], trial))];
        const double lost = tokens * (1.0 / rate(trial) - 1.0 / rate(best));
        if (trial > best && lost <= saved_) {
            saved_ -= lost;
            best = trial;
        }
    }
    std::vector<std::int64_t> made;
    for (const Chooser& seq : seqs) made.push_back(fed(seq, best));
    return made;
}

std::vector<StepPlan> widest_plans(const std::vector<Sequence*>& seqs, const std::vector<std::int64_t>& rooms, std::int64_t block) {
    std::vector<StepPlan> plans;
    for (std::size_t i = 0; i < seqs.size(); ++i) {
        const Sequence& seq = *seqs[i];
        const std::int64_t draft_tokens = std::max(std::int64_t{0}, std::min(seq.num_draft_tokens(), rooms[i]));
        std::int64_t masks = std::min(seq.max_masks(block), rooms[i] - draft_tokens);
        const bool exact = seq.config().is_exact();
        if (exact || draft_tokens > 0)
            masks = seq.ends_at(draft_tokens) ? 0 : std::min(masks, seq.remaining() - draft_tokens - (exact ? 2 : 1));
        plans.push_back({seq.num_pending(), draft_tokens, std::max(std::int64_t{0}, masks)});
    }
    return plans;
}

} // namespace mars
