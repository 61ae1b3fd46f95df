// The same order of operations as in Python, so that doubles are rounded alike.
#include "decode/exact_planner.hpp"

#include <algorithm>

namespace mars {

namespace {

constexpr double trials = 0.01; // share of the time that may be spent on more masks than seem to pay
constexpr double lowest = -1e300;

// Values are tokens. `speed` (tokens per second) converts seconds to tokens, so the value of a step is the tokens it is
// expected to bring minus speed x its seconds, compared with going on at that speed.

struct Option {
    double value; // tokens
    StepPlan plan;
};

double number(std::int64_t count) { return static_cast<double>(count); }

/// Expected number of accepted draft tokens of that many masks.
double expected_of(const StepForecast& forecast, std::int64_t masks) { return forecast.expected[static_cast<std::size_t>(masks)]; }

/// The probability that all draft tokens of that many masks are accepted.
double all_accepted(const StepForecast& forecast, std::int64_t masks) {
    return masks > 0 ? expected_of(forecast, masks) - expected_of(forecast, masks - 1) : 1.0;
}

/// The best tokens per second that `num` sequences can keep up, over all constant numbers of masks.
///
/// A step that feeds m masks also feeds the last step's m draft tokens (expected(m) are accepted) and one token
/// more. With the probability `failing` one of them is wrong; the next step then has no draft tokens and accepts one token. So
/// 1 + failing steps accept 1 + expected(m) + failing tokens. A step is narrow if all sequences are without draft tokens.
double speed_of(const Cost& cost, const std::vector<StepForecast>& forecasts, double num, std::int64_t others) {
    std::int64_t most = 0;
    for (const StepForecast& forecast : forecasts) most = std::max(most, forecast.max_masks());
    double best = 0.0;
    for (std::int64_t masks = 0; masks <= most; ++masks) {
        double tokens = number(others), narrow = 1.0;
        for (const StepForecast& forecast : forecasts) {
            const std::int64_t m = std::min(masks, forecast.max_masks());
            const double failing = 1.0 - all_accepted(forecast, m);
            tokens += (1.0 + expected_of(forecast, m) + failing) / (1.0 + failing);
            narrow *= failing / (1.0 + failing);
        }
        const double seconds = (1.0 - narrow) * cost.of(num * (1.0 + 2.0 * number(masks))) + narrow * cost.of(num * (1.0 + number(masks)));
        best = std::max(best, tokens / seconds);
    }
    return best;
}

/// The value of m = 0, 1, ... masks in the next step: the tokens that their draft tokens bring, minus what feeding these
/// draft tokens beside as many masks costs. If one is wrong, the step after that has no draft tokens, so the gain spreads over 2 - all_accepted
/// steps.
std::vector<double> mask_values(const StepForecast& forecast, const Cost& cost, double speed, double num) {
    std::vector<double> values{0.0};
    for (std::int64_t m = 1; m <= forecast.max_masks(); ++m) {
        const double extra = speed * (cost.of(num * (1.0 + 2.0 * number(m))) - cost.of(num * (1.0 + number(m)))) / num;
        values.push_back((expected_of(forecast, m) - extra) / (2.0 - all_accepted(forecast, m)));
    }
    return values;
}

/// For each width of the step, the best feed of this sequence and its value.
///
/// p draft tokens bring 1 + the sum of the probabilities that the first 1, 2, ... p are accepted. If all p are, which has the
/// probability all_accepted[p], and the sequence goes on, the masks after them count.
std::vector<Option> options_of(const StepForecast& forecast, std::int64_t widest, const Cost& cost, double speed, double num) {
    const std::vector<double> later = mask_values(forecast, cost, speed, num);
    std::vector<std::int64_t> best_masks{0}; // by space: the number of masks with the highest value
    for (std::int64_t m = 1; m <= forecast.max_masks(); ++m) {
        const std::int64_t before = best_masks.back();
        best_masks.push_back(later[static_cast<std::size_t>(m)] > later[static_cast<std::size_t>(before)] ? m : before);
    }
    std::vector<double> all_accepted{1.0}, tokens{1.0};
    for (const double probability : forecast.probabilities) {
        all_accepted.push_back(all_accepted.back() * probability);
        tokens.push_back(tokens.back() + all_accepted.back());
    }
    const double goes_on = 1.0 - forecast.ending.value_or(0.0);
    std::vector<Option> best;
    for (std::int64_t width = 0; width <= widest; ++width) {
        const std::int64_t space = std::min(width - forecast.pending, forecast.room);
        Option option{space <= 0 ? tokens.front() : lowest, {forecast.pending, 0, 0}};
        for (std::int64_t p = 0; space > 0 && p <= std::min(space, forecast.num_draft_tokens()); ++p) {
            const std::int64_t m = best_masks[static_cast<std::size_t>(std::min(space - p, forecast.max_masks()))];
            const double future = goes_on * later[static_cast<std::size_t>(m)];
            const double value = tokens[static_cast<std::size_t>(p)] + all_accepted[static_cast<std::size_t>(p)] * future;
            if (value > option.value) option = {value, {forecast.pending, p, m}};
        }
        best.push_back(option);
    }
    return best;
}

/// The same feed with about twice the masks.
StepPlan wider(const StepForecast& forecast, const StepPlan& plan) {
    if (forecast.ending) return plan;
    const std::int64_t masks = std::min({2 * plan.masks + 1, forecast.max_masks(), forecast.room - plan.draft_tokens});
    return {plan.pending, plan.draft_tokens, std::max(masks, plan.masks)};
}

std::int64_t width_of(const std::vector<StepPlan>& plans, std::int64_t floor) {
    for (const StepPlan& plan : plans) floor = std::max(floor, plan.slots());
    return floor;
}

} // namespace

void TrialBudget::add(double seconds, double most) { seconds_ = std::min(seconds_ + trials * seconds, most); }

bool TrialBudget::pays(double loss) {
    if (loss > seconds_) return false;
    seconds_ -= loss;
    return true;
}

std::vector<StepPlan> ExactPlanner::choose(const Cost& cost, const std::vector<StepForecast>& forecasts, std::int64_t others,
                                           std::int64_t floor) {
    const double num = number(static_cast<std::int64_t>(forecasts.size()) + others);
    const auto price = [&](std::int64_t width) { return cost.of(num * number(std::max(width, floor))); };
    std::int64_t least = 0, widest = 0;
    for (const StepForecast& forecast : forecasts) {
        least = std::max(least, forecast.pending);
        widest = std::max(
            {widest, forecast.pending, forecast.pending + std::min(forecast.room, forecast.num_draft_tokens() + forecast.max_masks())});
    }
    const double speed = speed_of(cost, forecasts, num, others);
    std::vector<std::vector<Option>> options;
    for (const StepForecast& forecast : forecasts) options.push_back(options_of(forecast, widest, cost, speed, num));
    std::int64_t best = least;
    double best_value = lowest;
    for (std::int64_t width = least; width <= widest; ++width) {
        double value = 0.0;
        for (const auto& of_row : options) value += of_row[static_cast<std::size_t>(width)].value;
        value -= speed * price(width);
        if (value > best_value) {
            best = width;
            best_value = value;
        }
    }
    trial_budget_.add(price(best), price(widest));
    std::vector<StepPlan> plans, wide;
    bool is_wider = false;
    for (std::size_t i = 0; i < forecasts.size(); ++i) {
        plans.push_back(options[i][static_cast<std::size_t>(best)].plan);
        wide.push_back(wider(forecasts[i], plans[i]));
        is_wider = is_wider || wide[i].masks != plans[i].masks;
    }
    const double loss = price(width_of(wide, floor)) - price(width_of(plans, floor));
    return is_wider && trial_budget_.pays(loss) ? wide : plans;
}

} // namespace mars
