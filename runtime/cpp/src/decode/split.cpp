// In the order of runtime/decode/split.py, so that doubles round alike; tests/conformance/splits.json holds both together.
#include <algorithm>

#include <mars/split.hpp>

namespace mars {

namespace {

constexpr double trials = 0.015; // share of the time that may go into more masks than seem to pay
constexpr double lowest = -1e300;

struct Choice {
    double value;
    Feed feed;
};

double number(std::int64_t count) { return static_cast<double>(count); }

/// Tokens a second if all goes on as it is: every step feeds its masks and the proposals of the last ones.
double speed_of(const Cost& cost, const std::vector<Chances>& rows, double num, std::int64_t others) {
    std::int64_t most = 0;
    for (const Chances& row : rows) most = std::max(most, row.most_masks());
    double best = 0.0;
    for (std::int64_t masks = 0; masks <= most; ++masks) {
        double total = 0.0, longest = 0.0;
        for (const Chances& row : rows) {
            const double held = row.worth[static_cast<std::size_t>(std::min(masks, row.most_masks()))];
            total += held;
            longest = std::max(longest, held);
        }
        const double tokens = total + number(static_cast<std::int64_t>(rows.size())) + number(others);
        best = std::max(best, tokens / cost.of(num * (1.0 + number(masks) + longest)));
    }
    return best;
}

/// For each width of the step, the best value of this row and the feed that has it.
std::vector<Choice> splits_of(const Chances& row, std::int64_t widest, const Cost& cost, double speed, double num) {
    const double one = cost.of(num);
    // What masks are worth later, and the width that their proposals will cost then.
    std::vector<double> later;
    std::vector<std::int64_t> masks_of; // by space: the number of masks that are worth most
    for (const double held : row.worth) {
        later.push_back(held - speed * (cost.of(num * (1.0 + held)) - one) / num);
        const bool is_best = masks_of.empty() || later.back() > later[static_cast<std::size_t>(masks_of.back())];
        masks_of.push_back(is_best ? static_cast<std::int64_t>(masks_of.size()) : masks_of.back());
    }
    std::vector<double> chances{1.0}, tokens{1.0};
    for (const double hope : row.hopes) {
        chances.push_back(chances.back() * hope);
        tokens.push_back(tokens.back() + chances.back());
    }
    const double ending = row.ending.value_or(0.0);
    // Where an end is in sight, proposals that are left out have to be fed after all: one more step.
    const auto rest = [&](std::int64_t left) {
        return left > 0 ? number(left) - speed * cost.of(num * (1.0 + number(left))) / num : 0.0;
    };
    std::vector<Choice> best;
    for (std::int64_t width = 0; width <= widest; ++width) {
        const std::int64_t space = std::min(width - row.known, row.room);
        Choice choice{space <= 0 ? tokens.front() : lowest, {row.known, 0, 0}};
        for (std::int64_t p = 0; space > 0 && p <= std::min(space, row.num_hopes()); ++p) {
            const std::int64_t m = masks_of[static_cast<std::size_t>(std::min(space - p, row.most_masks()))];
            const double future = (1.0 - ending) * later[static_cast<std::size_t>(m)] + ending * rest(row.num_hopes() - p);
            const double value = tokens[static_cast<std::size_t>(p)] + chances[static_cast<std::size_t>(p)] * future;
            if (value > choice.value) choice = {value, {row.known, p, m}};
        }
        best.push_back(choice);
    }
    return best;
}

/// About twice the masks.
Feed wider(const Chances& row, const Feed& feed) {
    if (row.ending) return feed;
    const std::int64_t masks = std::min({2 * feed.masks + 1, row.most_masks(), row.room - feed.proposals});
    return {feed.known, feed.proposals, std::max(masks, feed.masks)};
}

std::int64_t width_of(const std::vector<Feed>& feeds, std::int64_t floor) {
    for (const Feed& feed : feeds) floor = std::max(floor, feed.slots());
    return floor;
}

} // namespace

std::vector<Feed> Splitter::choose(const Cost& cost, const std::vector<Chances>& rows, std::int64_t others, std::int64_t floor) {
    const double num = number(static_cast<std::int64_t>(rows.size()) + others);
    const auto price = [&](std::int64_t width) { return cost.of(num * number(std::max(width, floor))); };
    std::int64_t least = 0, widest = 0;
    for (const Chances& row : rows) {
        least = std::max(least, row.known);
        widest = std::max({widest, row.known, row.known + std::min(row.room, row.num_hopes() + row.most_masks())});
    }
    const double speed = speed_of(cost, rows, num, others);
    std::vector<std::vector<Choice>> splits;
    for (const Chances& row : rows) splits.push_back(splits_of(row, widest, cost, speed, num));
    std::int64_t best = least;
    double best_value = lowest;
    for (std::int64_t width = least; width <= widest; ++width) {
        if (few_sizes_ && width != least && width != widest && (width & (width - 1)) != 0) continue;
        double value = 0.0;
        for (const auto& split : splits) value += split[static_cast<std::size_t>(width)].value;
        value -= speed * price(width);
        if (value > best_value) {
            best = width;
            best_value = value;
        }
    }
    saved_ = std::min(saved_ + trials * price(best), price(widest));
    std::vector<Feed> feeds, wide;
    bool is_wider = false;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        feeds.push_back(splits[i][static_cast<std::size_t>(best)].feed);
        wide.push_back(wider(rows[i], feeds[i]));
        is_wider = is_wider || wide[i].masks != feeds[i].masks;
    }
    // A trial, where what was set aside pays for it: masks that are not fed teach nothing.
    const double lost = price(width_of(wide, floor)) - price(width_of(feeds, floor));
    if (!is_wider || lost > saved_) return feeds;
    saved_ -= lost;
    return wide;
}

} // namespace mars
