// Same order of operations as runtime/decode/pace/split.py, so that doubles are rounded alike; tests/conformance/splits.json
// compares them.
#include "decode/split.hpp"

#include <algorithm>

namespace mars {

namespace {

constexpr double trials = 0.015; // share of the time that may be spent on more masks than seem to pay
constexpr double lowest = -1e300;

// Values are tokens. `speed` (tokens per second) converts seconds to tokens, so the value of a step is the tokens it is
// expected to bring minus speed x its seconds, compared with going on at that speed.

struct Option {
    double value; // tokens
    Feed feed;
};

double number(std::int64_t count) { return static_cast<double>(count); }

/// Expected number of verified proposals of that many masks.
double worth_of(const Chances& row, std::int64_t masks) { return row.worth[static_cast<std::size_t>(masks)]; }

/// How likely all proposals of that many masks are verified.
double all_verified(const Chances& row, std::int64_t masks) { return masks > 0 ? worth_of(row, masks) - worth_of(row, masks - 1) : 1.0; }

/// The best tokens per second that `num` rows can keep up, over all constant numbers of masks.
///
/// A step that feeds m masks also feeds the last step's proposals, of which worth(m) are verified, and accepts one token
/// more. With the chance `failing` one of them is wrong; the next step then has no proposals and accepts one token. So
/// 1 + failing steps accept 1 + worth(m) + failing tokens. A step has 1 + m + verified slots a row.
double speed_of(const Cost& cost, const std::vector<Chances>& rows, double num, std::int64_t others) {
    std::int64_t most = 0;
    for (const Chances& row : rows) most = std::max(most, row.most_masks());
    double best = 0.0;
    for (std::int64_t masks = 0; masks <= most; ++masks) {
        double tokens = number(others), verified = 0.0;
        for (const Chances& row : rows) {
            const std::int64_t m = std::min(masks, row.most_masks());
            const double failing = 1.0 - all_verified(row, m);
            tokens += (1.0 + worth_of(row, m) + failing) / (1.0 + failing);
            verified = std::max(verified, worth_of(row, m));
        }
        best = std::max(best, tokens / cost.of(num * (1.0 + number(masks) + verified)));
    }
    return best;
}

/// What m = 0, 1, ... masks are worth in the next step: the tokens that their proposals bring, minus what feeding these
/// proposals costs. If one is wrong, the step after that has no proposals, so the gain spreads over 2 - all_verified
/// steps.
std::vector<double> mask_values(const Chances& row, const Cost& cost, double speed, double num) {
    const double one = cost.of(num);
    std::vector<double> values{0.0};
    for (std::int64_t m = 1; m <= row.most_masks(); ++m) {
        const double extra = speed * (cost.of(num * (1.0 + number(m))) - one) / num;
        values.push_back((worth_of(row, m) - extra) / (2.0 - all_verified(row, m)));
    }
    return values;
}

/// For each width of the step, the best feed of this row and its value.
///
/// p proposals bring 1 + the sum of the chances that the first 1, 2, ... p are verified. If all p are, which has the
/// chance chances[p], the masks after them count; or if an end of sequence was proposed (`ending`), the proposals that
/// were left out, which another step has to feed.
std::vector<Option> options_of(const Chances& row, std::int64_t widest, const Cost& cost, double speed, double num) {
    const std::vector<double> later = mask_values(row, cost, speed, num);
    std::vector<std::int64_t> best_masks{0}; // by space: the number of masks that is worth most
    for (std::int64_t m = 1; m <= row.most_masks(); ++m) {
        const std::int64_t before = best_masks.back();
        best_masks.push_back(later[static_cast<std::size_t>(m)] > later[static_cast<std::size_t>(before)] ? m : before);
    }
    std::vector<double> chances{1.0}, tokens{1.0};
    for (const double hope : row.hopes) {
        chances.push_back(chances.back() * hope);
        tokens.push_back(tokens.back() + chances.back());
    }
    const double ending = row.ending.value_or(0.0);
    std::vector<double> verified{0.0}; // expected number of verified proposals among the last 0, 1, ...
    for (auto hope = row.hopes.rbegin(); hope != row.hopes.rend(); ++hope) verified.push_back(*hope * (1.0 + verified.back()));
    const auto left_out = [&](std::int64_t left) {
        return left > 0 ? verified[static_cast<std::size_t>(left)] - speed * cost.of(num * (1.0 + number(left))) / num : 0.0;
    };
    std::vector<Option> best;
    for (std::int64_t width = 0; width <= widest; ++width) {
        const std::int64_t space = std::min(width - row.pending, row.room);
        Option option{space <= 0 ? tokens.front() : lowest, {row.pending, 0, 0}};
        for (std::int64_t p = 0; space > 0 && p <= std::min(space, row.num_hopes()); ++p) {
            const std::int64_t m = best_masks[static_cast<std::size_t>(std::min(space - p, row.most_masks()))];
            const double future = (1.0 - ending) * later[static_cast<std::size_t>(m)] + ending * left_out(row.num_hopes() - p);
            const double value = tokens[static_cast<std::size_t>(p)] + chances[static_cast<std::size_t>(p)] * future;
            if (value > option.value) option = {value, {row.pending, p, m}};
        }
        best.push_back(option);
    }
    return best;
}

/// The same feed with about twice the masks.
Feed wider(const Chances& row, const Feed& feed) {
    if (row.ending) return feed;
    const std::int64_t masks = std::min({2 * feed.masks + 1, row.most_masks(), row.room - feed.proposals});
    return {feed.pending, feed.proposals, std::max(masks, feed.masks)};
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
        least = std::max(least, row.pending);
        widest = std::max({widest, row.pending, row.pending + std::min(row.room, row.num_hopes() + row.most_masks())});
    }
    const double speed = speed_of(cost, rows, num, others);
    std::vector<std::vector<Option>> options;
    for (const Chances& row : rows) options.push_back(options_of(row, widest, cost, speed, num));
    std::int64_t best = least;
    double best_value = lowest;
    for (std::int64_t width = least; width <= widest; ++width) {
        if (few_sizes_ && width != least && width != widest && (width & (width - 1)) != 0) continue;
        double value = 0.0;
        for (const auto& of_row : options) value += of_row[static_cast<std::size_t>(width)].value;
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
        feeds.push_back(options[i][static_cast<std::size_t>(best)].feed);
        wide.push_back(wider(rows[i], feeds[i]));
        is_wider = is_wider || wide[i].masks != feeds[i].masks;
    }
    // Try more masks if the time set aside pays for it, because masks that are not fed teach nothing.
    const double lost = price(width_of(wide, floor)) - price(width_of(feeds, floor));
    if (!is_wider || lost > saved_) return feeds;
    saved_ -= lost;
    return wide;
}

} // namespace mars
