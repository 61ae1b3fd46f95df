// Same order of operations as runtime/decode/pace/split.py, so that doubles are rounded alike; tests/conformance/splits.json
// compares them.
#include "decode/split.hpp"

#include <algorithm>

namespace mars {

namespace {

constexpr double trials = 0.015; // share of the time that may be spent on more masks than seem to pay
constexpr double lowest = -1e300;

struct Choice {
    double value;
    Feed feed;
};

double number(std::int64_t count) { return static_cast<double>(count); }

double worth_of(const Chances& row, std::int64_t masks) { return row.worth[static_cast<std::size_t>(masks)]; }

/// How likely all proposals of so many masks hold.
double all_hold(const Chances& row, std::int64_t masks) { return masks > 0 ? worth_of(row, masks) - worth_of(row, masks - 1) : 1.0; }

/// Tokens a second if all goes on as it is: a step feeds its masks and the proposals of the last one, and where those fail, the step
/// after it has none.
double speed_of(const Cost& cost, const std::vector<Chances>& rows, double num, std::int64_t others) {
    std::int64_t most = 0;
    for (const Chances& row : rows) most = std::max(most, row.most_masks());
    double best = 0.0;
    for (std::int64_t masks = 0; masks <= most; ++masks) {
        double tokens = number(others), held = 0.0;
        for (const Chances& row : rows) {
            const std::int64_t m = std::min(masks, row.most_masks());
            const double failing = 1.0 - all_hold(row, m);
            tokens += (1.0 + worth_of(row, m) + failing) / (1.0 + failing);
            held = std::max(held, worth_of(row, m));
        }
        best = std::max(best, tokens / cost.of(num * (1.0 + number(masks) + held)));
    }
    return best;
}

/// For each width of the step, the best value of this row and the feed that has it.
std::vector<Choice> splits_of(const Chances& row, std::int64_t widest, const Cost& cost, double speed, double num) {
    const double one = cost.of(num);
    // What m masks are worth in the next step: the tokens that will hold, less what feeding them costs; and where one fails, the step
    // after it has no proposals and lacks as much.
    std::vector<double> later{0.0};
    std::vector<std::int64_t> masks_of{0}; // by space: the number of masks that are worth most
    for (std::int64_t m = 1; m <= row.most_masks(); ++m) {
        const double extra = speed * (cost.of(num * (1.0 + number(m))) - one) / num;
        later.push_back((worth_of(row, m) - extra) / (2.0 - all_hold(row, m)));
        masks_of.push_back(later.back() > later[static_cast<std::size_t>(masks_of.back())] ? m : masks_of.back());
    }
    std::vector<double> chances{1.0}, tokens{1.0};
    for (const double hope : row.hopes) {
        chances.push_back(chances.back() * hope);
        tokens.push_back(tokens.back() + chances.back());
    }
    const double ending = row.ending.value_or(0.0);
    // Where an end is in sight, proposals that are left out have to be fed after all: one more step.
    const auto rest = [&](std::int64_t left) { return left > 0 ? number(left) - speed * cost.of(num * (1.0 + number(left))) / num : 0.0; };
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
