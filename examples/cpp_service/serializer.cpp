#include "serializer.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace openai {

namespace {

const char* reason_of(mars::FinishReason reason) {
    return reason == mars::FinishReason::eos || reason == mars::FinishReason::stop ? "stop" : "length";
}

double rounded(double value, double digits) { return std::round(value * digits) / digits; }

Json masks_shown(std::int64_t masks) {
    if (masks == mars::auto_masks) return "auto";
    return masks == mars::all_masks ? Json("full") : Json(masks);
}

Json shown(const std::vector<Step>& steps) {
    Json list = Json::array();
    for (const Step& step : steps) {
        Json tokens = Json::array();
        for (const Token& token : step.tokens) {
            tokens.push_back({{"id", token.id}, {"text", token.text}, {"p", rounded(token.p, 1e6)}, {"how", token.how}});
            if (token.is_thinking) tokens.back()["thinking"] = true;
        }
        list.push_back({{"step", step.number}, {"tokens", std::move(tokens)}});
    }
    return list;
}

std::int64_t now() { return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count(); }

} // namespace

std::vector<Step> Steps::push(const mars::Event& event) {
    if (!event.token_ids.empty()) {
        Step step{number_++, {}, 0};
        for (std::size_t i = 0; i < event.token_ids.size(); ++i) {
            text_.push(event.token_ids[i]);
            std::string text = text_.read();
            spelled_ += text.size();
            const bool is_forced = std::count(event.forced.begin(), event.forced.end(), static_cast<std::int64_t>(i)) > 0;
            const char* how = is_forced ? "forced" : static_cast<std::int64_t>(i) < event.accepted_draft_tokens ? "verified" : "accepted";
            step.tokens.push_back({event.token_ids[i], std::move(text), event.confidences[i], how});
        }
        step.end = spelled_;
        held_.push_back(std::move(step));
    }
    shown_ += event.text.size();
    if (event.finish_reason) return rest();
    std::vector<Step> ready;
    // The last step waits while its last token ends inside a character; if the answer ends there, that token's text is
    // what the stream finishes with.
    while (!held_.empty() && held_.front().end <= shown_ && (!held_.front().tokens.back().text.empty() || held_.size() > 1)) {
        ready.push_back(std::move(held_.front()));
        held_.pop_front();
    }
    return ready;
}

/// The remaining steps, with their text cut where the answer ends: before a stop string.
std::vector<Step> Steps::rest() {
    if (held_.empty()) return {};
    const std::string tail = text_.finish();
    held_.back().tokens.back().text += tail;
    spelled_ += tail.size();
    for (auto step = held_.rbegin(); step != held_.rend(); ++step)
        for (auto token = step->tokens.rbegin(); token != step->tokens.rend() && spelled_ > shown_; ++token) {
            const std::size_t excess = std::min(spelled_ - shown_, token->text.size());
            token->text.resize(token->text.size() - excess);
            spelled_ -= excess;
        }
    std::vector<Step> all(held_.begin(), held_.end());
    held_.clear();
    return all;
}

Serializer::Serializer(const std::string& number, std::string model, const ApiRequest& api_request)
    : id((api_request.kind == Kind::chat ? "chatcmpl-" : "cmpl-") + number), model_(std::move(model)), ask_(api_request), created_(now()) {}

bool Serializer::is_over() const {
    return std::all_of(choices.begin(), choices.end(), [](const Choice& choice) { return choice.reason.has_value(); });
}

Json Serializer::body() const {
    Json entries = Json::array();
    for (const Choice& choice : choices) {
        Json made{{"index", choice.index}};
        if (is_chat())
            made["message"] = {{"role", "assistant"}, {"content", choice.said.text}, {"refusal", nullptr}};
        else
            made["text"] = choice.said.text;
        if (!choice.said.thinking.empty()) made["message"]["reasoning_content"] = choice.said.thinking;
        made["logprobs"] = nullptr;
        made["finish_reason"] = reason_of(*choice.reason);
        if (ask_.return_steps) made["steps"] = shown(choice.made);
        entries.push_back(std::move(made));
    }
    Json whole = head(is_chat() ? "chat.completion" : "text_completion", std::move(entries));
    whole["usage"] = usage();
    record(whole);
    return whole;
}

std::vector<Json> Serializer::opening() const {
    std::vector<Json> made;
    for (const Choice& choice : choices) {
        if (!is_chat()) break;
        Json begun = entry(choice, {}, {});
        begun["delta"] = {{"role", "assistant"}, {"content", ""}};
        made.push_back(chunk(std::move(begun)));
    }
    return made;
}

mars::ThinkingStream::Piece Serializer::push(Choice& choice, const mars::Event& event) const {
    mars::ThinkingStream::Piece said{"", event.text};
    if (choice.thinking) {
        said = choice.thinking->push(event.text);
        const mars::ThinkingStream::Piece rest = event.finish_reason ? choice.thinking->finish() : mars::ThinkingStream::Piece();
        said = {said.thinking + rest.thinking, said.text + rest.text};
    }
    choice.said = {choice.said.thinking + said.thinking, choice.said.text + said.text};
    std::vector<Step> steps = choice.steps ? choice.steps->push(event) : std::vector<Step>();
    for (Step& step : steps) {
        for (Token& token : step.tokens) {
            token.is_thinking = choice.thinking && choice.num_spelled < choice.thinking->size();
            choice.num_spelled += token.text.size();
            choice.num_thinking += token.is_thinking ? 1 : 0;
        }
        if (ask_.return_steps) choice.made.push_back(std::move(step));
    }
    choice.reason = event.finish_reason;
    return said;
}

std::vector<Json> Serializer::chunks(Choice& choice, const mars::Event& event) {
    const mars::ThinkingStream::Piece said = push(choice, event);
    const std::vector<Step> steps = std::exchange(choice.made, {});
    std::vector<Json> made;
    if (!said.text.empty() || !said.thinking.empty() || !steps.empty()) made.push_back(chunk(entry(choice, said, steps)));
    if (choice.reason) {
        Json end = entry(choice, {}, {});
        end["finish_reason"] = reason_of(*choice.reason);
        made.push_back(chunk(std::move(end)));
    }
    if (!is_over() || made.empty()) return made;
    if (ask_.include_usage) {
        made.push_back(chunk(Json()));
        made.back()["choices"] = Json::array();
        made.back()["usage"] = usage();
    }
    record(made.back());
    return made;
}

Json Serializer::settings() const {
    const std::optional<double> tau = choices.empty() ? ask_.config.tau : choices.front().request.tau();
    const mars::GenerationConfig& config = ask_.config;
    const bool is_as_given = tau == (config.is_exact() ? std::nullopt : std::optional(config.bound()));
    Json found{{"exact", !tau},
               {"tau", tau ? Json(*tau) : Json()},
               {"metric", to_string(config.metric)},
               {"profile", ask_.profile && is_as_given ? Json(*ask_.profile) : Json()},
               {"masks", masks_shown(config.masks)},
               {"level", nullptr}};
    if (!config.is_greedy()) found["seed"] = config.seed;
    return found;
}

// --- parts ---

Json Serializer::head(const char* object, Json entries) const {
    return {{"id", id}, {"object", object}, {"created", created_}, {"model", model_}, {"choices", std::move(entries)}};
}

Json Serializer::chunk(Json entry) const {
    Json entries = Json::array();
    entries.push_back(std::move(entry));
    return head(is_chat() ? "chat.completion.chunk" : "text_completion", std::move(entries));
}

/// One choice of a chunk, without text if it only begins or ends the answer.
Json Serializer::entry(const Choice& choice, const mars::ThinkingStream::Piece& said, const std::vector<Step>& steps) const {
    Json made{{"index", choice.index}};
    if (is_chat()) {
        made["delta"] = Json::object();
        if (!said.text.empty()) made["delta"]["content"] = said.text;
        if (!said.thinking.empty()) made["delta"]["reasoning_content"] = said.thinking;
    } else {
        made["text"] = said.text;
    }
    made["logprobs"] = nullptr;
    made["finish_reason"] = nullptr;
    if (ask_.return_steps && !steps.empty()) made["steps"] = shown(steps);
    return made;
}

/// OpenAI's counts. A prompt counts once, however many answers it gets.
Json Serializer::usage() const {
    std::int64_t prompt = 0, cached = 0, tokens = 0, thinking = 0, verified = 0, rejected = 0;
    for (const Choice& choice : choices) {
        const mars::Stats stats = choice.request.completion().stats;
        if (choice.index % ask_.n == 0) {
            prompt += stats.prompt_tokens;
            cached += stats.cached_tokens;
        }
        tokens += stats.tokens;
        thinking += choice.num_thinking;
        verified += stats.accepted_draft_tokens;
        rejected += stats.rejected_draft_tokens();
    }
    return {{"prompt_tokens", prompt},
            {"completion_tokens", tokens},
            {"total_tokens", prompt + tokens},
            {"prompt_tokens_details", {{"cached_tokens", cached}}},
            {"completion_tokens_details",
             {{"reasoning_tokens", thinking}, {"accepted_prediction_tokens", verified}, {"rejected_prediction_tokens", rejected}}}};
}

/// The settings used and the times; for several answers the sums of counts and the longest times.
void Serializer::record(Json& target) const {
    std::int64_t prompt = 0, cached = 0, tokens = 0, forwards = 0, later = 0;
    double prefill = 0, decode = 0, queue = 0;
    Json reasons = Json::array();
    for (const Choice& choice : choices) {
        const mars::Completion done = choice.request.completion();
        const mars::Stats& stats = done.stats;
        if (choice.index % ask_.n == 0) {
            prompt += stats.prompt_tokens - stats.cached_tokens;
            cached += stats.cached_tokens;
        }
        tokens += stats.tokens;
        forwards += stats.forwards;
        later += stats.tokens_after_first;
        prefill = std::max(prefill, stats.prefill_time);
        decode = std::max(decode, stats.decode_time);
        queue = std::max(queue, stats.queue_time);
        reasons.push_back(to_string(done.finish_reason));
    }
    target["mars"] = settings();
    target["mars"]["finish_reason"] = reasons.size() == 1 ? reasons[0] : reasons;
    const auto each = [](double value, std::int64_t number) { return value / static_cast<double>(number); };
    target["timings"] = {{"prompt_n", prompt},
                         {"prompt_ms", rounded(1e3 * prefill, 1e3)},
                         {"cached_n", cached},
                         {"predicted_n", tokens},
                         {"predicted_ms", rounded(1e3 * decode, 1e3)},
                         {"predicted_per_second", decode > 0 ? rounded(static_cast<double>(later) / decode, 1e3) : 0.0},
                         {"forwards", forwards},
                         {"tokens_per_forward", forwards > 0 ? rounded(each(static_cast<double>(tokens), forwards), 1e4) : 0.0},
                         {"queue_ms", rounded(1e3 * queue, 1e3)}};
}

} // namespace openai
