// Rows: what is accepted, and how a sequence ends.
#include <algorithm>
#include <cassert>

#include <mars/row.hpp>
#include <mars/sample.hpp>

namespace mars {

namespace {

template <typename T>
void append(std::vector<T>& target, const std::vector<T>& source) {
    target.insert(target.end(), source.begin(), source.end());
}

} // namespace

std::string_view to_string(FinishReason reason) {
    switch (reason) {
    case FinishReason::eos:
        return "eos";
    case FinishReason::stop:
        return "stop";
    case FinishReason::length:
        return "length";
    case FinishReason::capacity:
        return "capacity";
    case FinishReason::cancelled:
        break;
    }
    return "cancelled";
}

Predictions Predictions::of(const StepOutput& output, std::int64_t row, std::int64_t count, Metric metric) {
    const auto& values = metric == Metric::margin ? output.margin : metric == Metric::entropy ? output.entropy : output.confidence;
    const auto first = row * output.outputs, last = first + count;
    assert(last <= static_cast<std::int64_t>(values.size()) && "the session checks first that a metric was exported");
    Predictions made;
    made.token_ids.assign(output.token_ids.begin() + first, output.token_ids.begin() + last);
    made.confidences.assign(values.begin() + first, values.begin() + last);
    made.vocab_size = output.vocab_size;
    if (!output.logits.empty())
        made.logits.assign(output.logits.begin() + first * output.vocab_size, output.logits.begin() + last * output.vocab_size);
    return made;
}

Predictions Predictions::then(const Predictions& later) const {
    Predictions joined = *this;
    append(joined.token_ids, later.token_ids);
    append(joined.confidences, later.confidences);
    append(joined.logits, later.logits);
    return joined;
}

Row::Row(std::int64_t number, std::vector<std::int64_t> prompt, GenerationConfig config, std::vector<std::int64_t> eos_ids,
         std::function<bool(std::int64_t)> stop)
    : index(number), tokens(std::move(prompt)), config_(std::move(config)), eos_ids_(config_.eos_ids.value_or(std::move(eos_ids))),
      stop_(std::move(stop)), wanted_tau_(config_.tau) {
    stats.prompt_tokens = num_tokens();
}

std::int64_t Row::look_ahead(std::int64_t block) const {
    const std::int64_t most = config_.one_token() ? 1 : config_.window >= 1 ? std::min(block, config_.window) : block;
    return std::max(std::int64_t{1}, std::min(most, remaining()));
}

Accepted Row::take(const Predictions& predictions) {
    Predictions chosen = config_.needs_logits() ? candidates(predictions) : predictions;
    auto count = accept(chosen.token_ids, chosen.confidences, config_.tau, config_.metric, eos_ids_, remaining());
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t token = chosen.token_ids[static_cast<std::size_t>(i)];
        tokens.push_back(token);
        if (std::find(eos_ids_.begin(), eos_ids_.end(), token) != eos_ids_.end()) {
            finish_reason = FinishReason::eos;
        } else if (stop_ && stop_(token)) {
            count = i + 1;
            finish_reason = FinishReason::stop;
        }
    }
    stats.count(count);
    // Where something else than tau ended the run, the row is over.
    std::vector<bool> passed;
    for (const double confidence : chosen.confidences) passed.push_back(passes(confidence, config_.tau, config_.metric));
    pass_rates.saw(count, passed);
    if (!finish_reason && remaining() <= 0) finish_reason = FinishReason::length;
    chosen.token_ids.resize(static_cast<std::size_t>(count));
    chosen.confidences.resize(static_cast<std::size_t>(count));
    return {index, std::move(chosen.token_ids), std::move(chosen.confidences), finish_reason};
}

Accepted Row::finish(FinishReason reason) {
    finish_reason = reason;
    return {index, {}, {}, reason};
}

void Row::refresh() {
    config_.tau = wanted_tau_.load();
    if (cancelled_.load() && !finish_reason) finish_reason = FinishReason::cancelled;
}

Predictions Row::candidates(const Predictions& predictions) const {
    const auto size = static_cast<std::int64_t>(predictions.token_ids.size());
    assert(static_cast<std::int64_t>(predictions.logits.size()) == size * predictions.vocab_size && "the session checks this first");
    Predictions chosen;
    // A later candidate only counts if all earlier ones are accepted, so they are part of what it has seen.
    std::vector<std::int64_t> seen = tokens;
    for (std::int64_t i = 0; i < size; ++i) {
        const float* logits = predictions.logits.data() + i * predictions.vocab_size;
        const Choice choice = choose(logits, predictions.vocab_size, config_, seen, static_cast<std::int64_t>(seen.size()));
        seen.push_back(choice.token);
        chosen.token_ids.push_back(choice.token);
        chosen.confidences.push_back(choice.confidence);
    }
    return chosen;
}

} // namespace mars
