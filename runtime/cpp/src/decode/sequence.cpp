#include "decode/sequence.hpp"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <utility>

#include <mars/errors.hpp>

#include "accept.hpp"
#include "decode/prefix.hpp"
#include "decode/sample.hpp"

namespace mars {

namespace {

constexpr double lookup_below = 3.0; // nothing is looked up if this many draft tokens will probably be accepted
constexpr double exact_mode = -1.0;  // instead of a tau

double wanted_of(const GenerationConfig& config) { return config.is_exact() ? exact_mode : config.bound(); }

} // namespace

std::string_view to_string(FinishReason reason) {
    constexpr const char* names[] = {"eos", "stop", "length", "capacity", "cancelled", "deadline"};
    return names[static_cast<std::size_t>(reason)];
}

Predictions Predictions::of(const StepOutput& output, std::int64_t seq, std::int64_t count, Metric metric) {
    const auto& values = metric == Metric::margin ? output.margin : metric == Metric::entropy ? output.entropy : output.confidence;
    assert(!values.empty() && "the session checks first that a metric was exported");
    Predictions predictions;
    // Of each array, the sequence's first predictions and, after those of wider sequences, the MTP layer's.
    const auto copy = [&](auto& target, const auto& source, std::int64_t width) {
        const auto begin = source.begin() + seq * output.outputs * width, end = begin + output.outputs * width;
        target.assign(begin, begin + count * width);
        target.insert(target.end(), end - output.mtp_drafts * width, end);
    };
    copy(predictions.token_ids, output.token_ids, 1);
    copy(predictions.confidences, values, 1);
    copy(predictions.probabilities, output.confidence, 1);
    predictions.vocab_size = output.vocab_size;
    if (!output.logits.empty()) copy(predictions.logits, output.logits, output.vocab_size);
    predictions.mtp_drafts = output.mtp_drafts;
    predictions.top_k = output.top_k;
    if (output.top_k > 0) {
        copy(predictions.topk_ids, output.topk_ids, output.top_k);
        copy(predictions.topk_logprobs, output.topk_logprobs, output.top_k);
    }
    return predictions;
}

DraftTokens Predictions::mtp_draft(const std::vector<std::int64_t>& chosen, std::int64_t count, std::int64_t num_verified) const {
    const auto first = probabilities.end() - mtp_drafts;
    const bool is_own = count == num_verified + 1 && std::equal(chosen.begin(), chosen.begin() + count, token_ids.begin());
    // No self-check covers the layer.
    if (!is_own || std::any_of(first, probabilities.end(), [](double share) { return std::isnan(share); })) return {};
    return {{token_ids.end() - mtp_drafts, token_ids.end()}, {first, probabilities.end()}, Source::masks};
}

Sequence::Sequence(std::int64_t number, std::vector<std::int64_t> prompt, GenerationConfig config, std::vector<std::int64_t> eos_ids,
                   std::function<bool(std::int64_t)> on_token, std::shared_ptr<AcceptanceRates> acceptance_rates)
    : index(number), tokens(std::move(prompt)), config_(std::move(config)), eos_ids_(config_.eos_ids.value_or(std::move(eos_ids))),
      on_token_(std::move(on_token)),
      acceptance_rates_(acceptance_rates ? std::move(acceptance_rates) : std::make_shared<AcceptanceRates>()), wanted_(wanted_of(config_)) {
    stats.prompt_tokens = num_tokens();
    if (config_.prompt_lookup > 0) prompt_lookup_.emplace(config_.prompt_lookup);
}

bool Sequence::ends_at(std::int64_t i) const {
    return i < draft_tokens.size() && is_one_of(draft_tokens.token_ids[static_cast<std::size_t>(i)], eos_ids_);
}

std::optional<std::int64_t> Sequence::next_copy() const { return prefix_handle ? prefix_handle->stop(cursor) : std::nullopt; }

std::int64_t Sequence::num_draft_tokens() const {
    if (!feeds_draft_tokens()) return 0;
    std::int64_t end = 0;
    while (end < draft_tokens.size() && !ends_at(end)) ++end;
    return std::max(std::int64_t{0}, std::min(end, remaining() - 1));
}

std::int64_t Sequence::max_masks() const {
    if (config_.one_token()) return 0;
    // Two more than the model was trained for cost their slots and no quality, and are often accepted.
    std::int64_t most = feeds_draft_tokens() && block > 1 ? block + 1 : block - 1;
    if (config_.masks >= 0) most = std::min(most, config_.masks);
    if (mask_limit) most = std::min(most, *mask_limit);
    if (commits_blocks()) most = std::min(most, cache_block - 1 - (is_full() ? 0 : num_pending()));
    return std::max(std::int64_t{0}, std::min(most, usable_masks()));
}

std::int64_t Sequence::usable_masks(std::int64_t num_drafts) const {
    return std::max(std::int64_t{0}, remaining() - num_drafts - (config_.is_exact() ? 2 : 1));
}

StepPlan Sequence::widest_plan(std::int64_t room) const {
    const std::int64_t drafts = std::max(std::int64_t{0}, std::min(num_draft_tokens(), room));
    std::int64_t masks = std::min(max_masks(), room - drafts);
    if (config_.is_exact() || drafts > 0) masks = ends_at(drafts) ? 0 : std::min(masks, usable_masks(drafts));
    return {num_pending(), drafts, std::max(std::int64_t{0}, masks)};
}

void Sequence::commit_chunk(std::int64_t num_tokens) {
    cursor += num_tokens;
    ++(is_prefilling() ? stats.prefill_forwards : stats.forwards);
}

std::optional<Accepted> Sequence::commit_and_accept(const Predictions& predictions, const StepPlan& plan) {
    for (std::int64_t i = 0; i < plan.outputs(); ++i)
        if (std::isnan(predictions.probabilities[static_cast<std::size_t>(i)]))
            throw DeviceError("the model's predictions are not numbers (NaN); export the bundle again");
    if (is_full()) cursor += plan.pending;
    ++stats.forwards;
    return accept(predictions, plan.draft_tokens);
}

std::optional<Accepted> Sequence::accept(const Predictions& predictions, std::int64_t num_draft_tokens) {
    Predictions chosen = config_.needs_logits() ? candidates(predictions, 0, num_draft_tokens) : predictions;
    const bool verifies = config_.is_exact();
    std::int64_t count = 0;
    if (verifies) {
        const std::vector<std::int64_t> fed(draft_tokens.token_ids.begin(), draft_tokens.token_ids.begin() + num_draft_tokens);
        count = verify(chosen.token_ids, fed, eos_ids_, remaining());
    } else {
        count = mars::accept(chosen.token_ids, chosen.confidences, config_.bound(), config_.metric, eos_ids_, remaining());
    }
    std::int64_t num_verified = verifies ? std::max(std::int64_t{0}, count - 1) : 0;
    for (std::int64_t i = 0; i < count; ++i) {
        append(chosen.token_ids[static_cast<std::size_t>(i)]);
        if (finish_reason) count = i + 1;
    }
    num_verified = std::min(num_verified, count);
    if (verifies) {
        advance(chosen.token_ids, predictions, count, num_verified, num_draft_tokens);
    } else {
        draft_tokens = {};
        // If something other than tau ended the run, the sequence is over.
        std::vector<bool> passed;
        for (const double confidence : chosen.confidences) passed.push_back(passes(confidence, config_.bound(), config_.metric));
        pass_rates.record(count, passed);
    }
    stats.count(count);
    if (!finish_reason && remaining() <= 0) finish_reason = FinishReason::length;
    chosen.token_ids.resize(static_cast<std::size_t>(count));
    chosen.confidences.resize(static_cast<std::size_t>(count));
    return Accepted{index, std::move(chosen.token_ids), std::move(chosen.confidences), finish_reason, num_verified};
}

void Sequence::append(std::int64_t token) {
    tokens.push_back(token);
    if (is_one_of(token, eos_ids_))
        finish_reason = FinishReason::eos;
    else if (on_token_ && on_token_(token))
        finish_reason = FinishReason::stop;
}

/// Verified draft tokens become final like pending tokens; the predictions after them are proposed next.
void Sequence::advance(const std::vector<std::int64_t>& token_ids, const Predictions& predictions, std::int64_t count,
                       std::int64_t num_verified, std::int64_t num_fed) {
    cursor = std::min(cursor + num_verified, num_tokens() - 1);
    count_draft_tokens(num_fed, num_verified, {token_ids.begin(), token_ids.begin() + count});
    if (predictions.mtp_drafts > 0 && !finish_reason) {
        draft_tokens = predictions.mtp_draft(token_ids, count, num_verified);
        return;
    }
    // Predictions after a wrong token are void: new masks are better guesses.
    if (num_verified < num_fed || finish_reason) {
        draft_tokens = {};
        return;
    }
    const std::vector<double>& probabilities = predictions.probabilities;
    draft_tokens = {{token_ids.begin() + count, token_ids.end()}, {probabilities.begin() + count, probabilities.end()}, Source::masks};
    see_masks(draft_tokens.confidences);
}

void Sequence::count_draft_tokens(std::int64_t num_fed, std::int64_t num_verified, std::vector<std::int64_t> appended) {
    stats.draft_tokens += num_fed - draft_tokens.num_forced(num_fed);
    stats.accepted_draft_tokens += num_verified - draft_tokens.num_forced(num_verified);
    appended.resize(std::min(appended.size(), static_cast<std::size_t>(num_verified) + 1)); // what follows are guesses, or forced
    acceptance_rates_->record(draft_tokens, appended);
}

void Sequence::see_masks(const std::vector<double>& probabilities) {
    std::vector<double> accepted;
    for (const double probability : probabilities) accepted.push_back(acceptance_rates_->probability(Source::masks, probability));
    mask_rates_.record(accepted);
    if (!accepted.empty() && stats.forwards == 1) acceptance_rates_->record_prompt(accepted);
}

void Sequence::consult_prompt_lookup(std::int64_t most) {
    if (!prompt_lookup_ || !config_.is_exact() || most < 1) return;
    const double expected = expected_accepted(draft_tokens);
    if (expected >= lookup_below) return;
    DraftTokens others = filter_draft(prompt_lookup_->propose(tokens, most));
    if (draft_tokens.size() == 0 || expected_accepted(others) > expected) draft_tokens = std::move(others);
}

double Sequence::expected_accepted(const DraftTokens& those) const { return expected_run(acceptance_rates_->probabilities(those)).back(); }

StepForecast Sequence::forecast(std::int64_t room) const {
    const std::int64_t num = num_draft_tokens();
    std::vector<double> probabilities = acceptance_rates_->probabilities(draft_tokens);
    StepForecast result{num_pending(), {}, std::nullopt, mask_rates_.expected(max_masks()), room};
    if (ends_at(num)) result.ending = probabilities[static_cast<std::size_t>(num)];
    probabilities.resize(static_cast<std::size_t>(num));
    result.probabilities = std::move(probabilities);
    return result;
}

void Sequence::set_tau(double tau) {
    if (!std::isfinite(tau) || tau < 0) throw SessionError("tau must be a number of 0 or more, not " + std::to_string(tau));
    wanted_.store(tau);
}

void Sequence::set_exact(bool exact) {
    if (exact)
        wanted_.store(exact_mode);
    else if (wanted_.load() == exact_mode)
        set_tau(default_tau);
}

std::optional<double> Sequence::tau() const {
    const double wanted = wanted_.load();
    return wanted == exact_mode ? std::nullopt : std::optional(wanted);
}

Accepted Sequence::finish(FinishReason reason) {
    finish_reason = reason;
    return {index, {}, {}, reason};
}

Accepted Sequence::fail(std::exception_ptr error) {
    if (!finish_reason) finish_reason = FinishReason::cancelled;
    prefix_handle = nullptr;
    return {index, {}, {}, finish_reason, 0, std::move(error)};
}

void Sequence::refresh() {
    config_.tau = tau();
    config_.exact = !config_.tau;
    if (config_.is_exact() && std::exchange(config_.masks_of_tau, false)) config_.masks = auto_masks;
    if (const int reason = told_.load(); reason != untold && !finish_reason) finish_reason = static_cast<FinishReason>(reason);
}

Predictions Sequence::candidates(const Predictions& predictions, std::int64_t first, std::int64_t num_draft_tokens) const {
    const auto size = static_cast<std::int64_t>(predictions.token_ids.size());
    assert(static_cast<std::int64_t>(predictions.logits.size()) == size * predictions.vocab_size && "the session checks this first");
    Predictions chosen;
    // A later candidate counts only if all earlier ones are accepted, so they are part of what it has seen.
    std::vector<std::int64_t> seen = tokens;
    for (std::int64_t i = first; i < size; ++i) {
        const float* logits = predictions.logits.data() + i * predictions.vocab_size;
        const Choice choice = choose(logits, predictions.vocab_size, config_, seen, static_cast<std::int64_t>(seen.size()));
        seen.push_back(choice.token);
        chosen.token_ids.push_back(choice.token);
        chosen.confidences.push_back(choice.confidence);
        if (i < num_draft_tokens && choice.token != draft_tokens.token_ids[static_cast<std::size_t>(i)]) break; // a draw takes time
    }
    return chosen;
}

} // namespace mars
