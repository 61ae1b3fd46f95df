// Same order of operations as runtime/decode/pace/policy.py, so that doubles are rounded alike.
#include "decode/policy.hpp"

#include <algorithm>

namespace mars {

namespace {

// Share of the time that may be spent on trying more masks than currently pay, if the next token is always certain.
constexpr double trials = 0.015;

std::int64_t fed(const Chooser& row, std::int64_t masks) { return row.is_free ? std::min(masks, row.most) : row.most; }

} // namespace

std::vector<Feed> Policy::feeds(const std::vector<Row*>& rows, const std::vector<std::int64_t>& rooms, std::int64_t block) {
    std::vector<Feed> feeds = widest_feeds(rows, rooms, block);
    std::vector<std::size_t> by_tau, free;
    std::vector<Chooser> choosers;
    std::vector<Forecast> forecasts;
    std::int64_t others = 0, floor = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const Row& row = *rows[i];
        if (row.config().is_exact()) continue;
        by_tau.push_back(i);
        choosers.push_back({&row.pass_rates, feeds[i].pending, feeds[i].masks, row.config().window == auto_window});
    }
    const std::vector<std::int64_t> chosen = masks(choosers);
    for (std::size_t i = 0; i < by_tau.size(); ++i) feeds[by_tau[i]].masks = chosen[i];
    for (std::size_t i = 0; i < rows.size(); ++i) {
        if (rows[i]->config().is_exact() && rows[i]->config().window == auto_window) {
            free.push_back(i);
            forecasts.push_back(rows[i]->forecast(block, rooms[i]));
        } else {
            ++others;
            floor = std::max(floor, feeds[i].slots());
        }
    }
    if (free.empty()) return feeds;
    const std::vector<Feed> split = splitter_.choose(*cost_(), forecasts, others, floor);
    for (std::size_t i = 0; i < free.size(); ++i) {
        Feed& feed = feeds[free[i]];
        feed = split[i];
        // Do not feed masks whose proposals could no longer be used.
        feed.masks = std::min(feed.masks, std::max(std::int64_t{0}, rows[free[i]]->remaining() - feed.proposals - 2));
    }
    return feeds;
}

std::vector<std::int64_t> Policy::masks(const std::vector<Chooser>& rows) {
    std::int64_t widest = 0;
    std::vector<std::vector<double>> expected;
    for (const Chooser& row : rows) {
        if (row.is_free) widest = std::max(widest, row.most);
        expected.push_back(row.pass_rates->expected(row.most));
    }
    const auto cost = widest > 0 ? cost_() : nullptr;
    const auto count = static_cast<double>(rows.size());
    const auto rate = [&](std::int64_t masks) {
        // Each row will feed the tokens it is expected to accept in its next step, so they determine the cost, not the
        // currently pending ones.
        double total = 0.0, slots = 0.0;
        for (std::size_t i = 0; i < rows.size(); ++i) {
            const std::int64_t own = fed(rows[i], masks);
            const double tokens = expected[i][static_cast<std::size_t>(own)];
            total += tokens;
            slots = std::max(slots, tokens + static_cast<double>(own));
        }
        return total / cost->of(count * slots);
    };
    const auto seconds = [&](std::int64_t masks) {
        std::int64_t slots = 0;
        for (const Chooser& row : rows) slots = std::max(slots, row.pending + fed(row, masks));
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
        for (const Chooser& row : rows) certainty += row.pass_rates->certainty();
        saved_ = std::min(saved_ + trials * (certainty / count) * seconds(best), seconds(widest));
        const std::int64_t trial = std::min(2 * best + 1, widest);
        double tokens = 0.0;
        for (std::size_t i = 0; i < rows.size(); ++i) tokens += expected[i][static_cast<std::size_t>(fed(rows[i], trial))];
        const double lost = tokens * (1.0 / rate(trial) - 1.0 / rate(best));
        if (trial > best && lost <= saved_) {
            saved_ -= lost;
            best = trial;
        }
    }
    std::vector<std::int64_t> made;
    for (const Chooser& row : rows) made.push_back(fed(row, best));
    return made;
}

std::vector<Feed> widest_feeds(const std::vector<Row*>& rows, const std::vector<std::int64_t>& rooms, std::int64_t block) {
    std::vector<Feed> feeds;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const Row& row = *rows[i];
        const std::int64_t proposals = std::max(std::int64_t{0}, std::min(row.num_proposals(), rooms[i]));
        std::int64_t masks = std::min(row.max_masks(block), rooms[i] - proposals);
        const bool exact = row.config().is_exact();
        if (exact || proposals > 0) masks = row.ends_at(proposals) ? 0 : std::min(masks, row.remaining() - proposals - (exact ? 2 : 1));
        feeds.push_back({row.num_pending(), proposals, std::max(std::int64_t{0}, masks)});
    }
    return feeds;
}

} // namespace mars
