// Fields one by one, with their types checked; what is left at the end is refused by name.
#include "openai.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <set>

#include <mars/errors.hpp>

namespace openai {

namespace {

constexpr int max_depth = 32; // lists and objects in each other

// Known to OpenAI's clients and others, and nothing that an answer depends on.
const std::set<std::string> harmless{
    "user",       "metadata",          "store",    "service_tier",       "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "timings_per_token", "priority", "parallel_tool_calls"};

// They would change the answer and are not done here: the value with which nothing changes.
const std::map<std::string, Json> neutral{{"n", 1},
                                          {"presence_penalty", 0},
                                          {"frequency_penalty", 0},
                                          {"logit_bias", Json::object()},
                                          {"logprobs", false},
                                          {"top_logprobs", 0},
                                          {"tools", Json::array()},
                                          {"tool_choice", "none"},
                                          {"response_format", {{"type", "text"}}},
                                          {"modalities", {"text"}},
                                          {"min_tokens", 0},
                                          {"stop_token_ids", Json::array()},
                                          {"best_of", 1}};

std::string shown(const Json& value) {
    if (value.is_structured()) return value.is_array() ? "a list" : "an object";
    return value.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 60);
}

[[noreturn]] void wrong(const std::string& name, const std::string& what, const Json& value) {
    throw Refused(400, name + " must be " + what + ", not " + shown(value), name);
}

Json parse(const std::string& body) {
    const auto limit = [](int depth, Json::parse_event_t, Json&) {
        if (depth > max_depth) throw Refused(400, "the body has lists nested too deep");
        return true;
    };
    Json value = Json::parse(body, limit, false);
    if (!value.is_object()) throw Refused(400, "the body must be a JSON object");
    return value;
}

/// The fields that are not null.
class Fields {
  public:
    explicit Fields(Json body) : left_(std::move(body)) {}

    std::optional<Json> any(const char* name) {
        const auto at = left_.find(name);
        if (at == left_.end()) return std::nullopt;
        Json value = std::move(*at);
        left_.erase(at);
        return value.is_null() ? std::nullopt : std::optional(std::move(value));
    }

    std::optional<std::string> text(const char* name) {
        const auto value = any(name);
        if (value && !value->is_string()) wrong(name, "a text", *value);
        return value ? std::optional(value->get<std::string>()) : std::nullopt;
    }

    std::optional<bool> flag(const char* name) {
        const auto value = any(name);
        if (value && !value->is_boolean()) wrong(name, "true or false", *value);
        return value ? std::optional(value->get<bool>()) : std::nullopt;
    }

    std::optional<double> number(const char* name) {
        const auto value = any(name);
        if (value && !value->is_number()) wrong(name, "a number", *value);
        return value ? std::optional(value->get<double>()) : std::nullopt;
    }

    std::optional<std::int64_t> integer(const char* name) {
        const auto value = any(name);
        const bool fits =
            value && value->is_number_integer() && (!value->is_number_unsigned() || value->get<std::uint64_t>() <= std::uint64_t{1} << 62U);
        if (value && !fits) wrong(name, "an integer", *value);
        return value ? std::optional(value->get<std::int64_t>()) : std::nullopt;
    }

    /// What nobody took is harmless, says nothing, or is refused.
    void finish() const {
        for (const auto& [name, value] : left_.items()) {
            if (value.is_null() || harmless.count(name) > 0) continue;
            const auto at = neutral.find(name);
            if (at == neutral.end()) throw Refused(400, "unknown field " + name.substr(0, 60), name.substr(0, 60));
            const bool is_auto = name == "tool_choice" && value == "auto";
            if (value != at->second && !is_auto)
                throw Refused(400, name + " is not supported here: " + shown(value), name, "unsupported_parameter");
        }
    }

  private:
    Json left_;
};

std::string content_of(const std::string& where, const Json& content) {
    if (content.is_string()) return content.get<std::string>();
    std::string text;
    if (!content.is_array()) throw Refused(400, where + ".content must be a text or a list of parts, not " + shown(content), "messages");
    for (const Json& part : content) {
        const bool good = part.is_object() && part.value("type", Json()) == "text" && part.contains("text") && part["text"].is_string();
        if (!good) throw Refused(400, where + ".content: only parts of type text are read here", "messages");
        text += part["text"].get<std::string>();
    }
    return text;
}

std::vector<mars::Message> messages_of(const std::optional<Json>& value, const Limits& limits) {
    if (!value || !value->is_array() || value->empty()) throw Refused(400, "messages must be a list of at least one message", "messages");
    if (value->size() > limits.messages)
        throw Refused(400, std::to_string(value->size()) + " messages, at most " + std::to_string(limits.messages) + " are taken",
                      "messages");
    std::vector<mars::Message> messages;
    for (const Json& each : *value) {
        const std::string where = "messages[" + std::to_string(messages.size()) + "]";
        if (!each.is_object()) throw Refused(400, where + " must be an object, not " + shown(each), "messages");
        if (!each.contains("role") || !each["role"].is_string()) throw Refused(400, where + ".role must be a text", "messages");
        if (each.contains("tool_calls") && !each["tool_calls"].is_null())
            throw Refused(400, where + ": tool calls are not supported here", "messages");
        messages.push_back({each["role"].get<std::string>(), content_of(where, each.value("content", Json()))});
    }
    return messages;
}

std::vector<std::string> stops_of(const std::optional<Json>& value, const Limits& limits) {
    if (!value) return {};
    if (value->is_string()) return {value->get<std::string>()};
    if (!value->is_array() || value->size() > limits.stop)
        wrong("stop", "a text or a list of at most " + std::to_string(limits.stop) + " texts", *value);
    std::vector<std::string> stops;
    for (const Json& each : *value) {
        if (!each.is_string()) wrong("stop", "a text or a list of texts", each);
        stops.push_back(each.get<std::string>());
    }
    return stops;
}

std::uint64_t seed_of(const Json& value) {
    if (!value.is_number_integer()) wrong("seed", "an integer", value);
    return value.is_number_unsigned() ? value.get<std::uint64_t>() : static_cast<std::uint64_t>(value.get<std::int64_t>());
}

std::int64_t window_of(const Json& value) {
    const auto window = mars::window_of(value.is_string() ? value.get<std::string>() : value.is_number_integer() ? value.dump() : "");
    if (!window) wrong("window", "auto, full or an integer of 1 or more", value);
    return *window;
}

mars::Metric metric_of(const std::string& name) {
    for (const mars::Metric metric : {mars::Metric::probability, mars::Metric::margin, mars::Metric::entropy})
        if (to_string(metric) == name) return metric;
    wrong("metric", "probability, margin or entropy", name);
}

bool usage_wanted(Fields& fields, bool stream) {
    const auto options = fields.any("stream_options");
    if (!options) return false;
    if (!options->is_object()) wrong("stream_options", "an object", *options);
    if (!stream) throw Refused(400, "stream_options are for streams; give stream: true", "stream_options");
    const Json wanted = options->value("include_usage", Json(false));
    if (!wanted.is_boolean()) wrong("stream_options.include_usage", "true or false", wanted);
    return wanted.get<bool>();
}

const char* reason_of(mars::FinishReason reason) {
    return reason == mars::FinishReason::eos || reason == mars::FinishReason::stop ? "stop" : "length";
}

double rounded(double value, double digits) { return std::round(value * digits) / digits; }

Json window_shown(std::int64_t window) {
    if (window == mars::auto_window) return "auto";
    return window == mars::full_window ? Json("full") : Json(window);
}

} // namespace

std::string text_of(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

Json error(int status, const std::string& message, const std::string& param, const std::string& code) {
    const char* type = status == 404   ? "not_found_error"
                       : status == 503 ? "service_unavailable_error"
                       : status < 500  ? "invalid_request_error"
                                       : "server_error";
    const auto or_null = [](const std::string& text) { return text.empty() ? Json() : Json(text); };
    return {{"error", {{"message", message}, {"type", type}, {"param", or_null(param)}, {"code", or_null(code)}}}};
}

Chat read_chat(const std::string& body, const Limits& limits) {
    const Json given = parse(body);
    const auto names = [&](const char* name) { return given.contains(name) && !given[name].is_null(); };
    Fields fields(given);
    Chat chat;
    auto& config = chat.config;
    chat.model = fields.text("model");
    chat.messages = messages_of(fields.any("messages"), limits);
    const auto old_most = fields.integer("max_tokens");
    const auto new_most = fields.integer("max_completion_tokens");
    chat.max_tokens = new_most ? new_most : old_most;
    if (chat.max_tokens && (*chat.max_tokens < 1 || *chat.max_tokens > limits.new_tokens))
        wrong("max_tokens", "an integer of 1 to " + std::to_string(limits.new_tokens), *chat.max_tokens);
    config.temperature = fields.number("temperature").value_or(config.temperature);
    config.top_p = fields.number("top_p").value_or(config.top_p);
    config.top_k = std::max(fields.integer("top_k").value_or(config.top_k), std::int64_t{-1});
    if (config.top_k == -1) config.top_k = 0; // off, as some clients write it
    config.min_p = fields.number("min_p").value_or(config.min_p);
    config.repetition_penalty = fields.number("repetition_penalty").value_or(config.repetition_penalty);
    if (const auto seed = fields.any("seed")) config.seed = seed_of(*seed);
    config.stop = stops_of(fields.any("stop"), limits);
    config.lookup = fields.integer("lookup").value_or(config.lookup);
    config.exact = fields.flag("exact");
    config.tau = fields.number("tau");
    if (const auto metric = fields.text("metric")) config.metric = metric_of(*metric);
    if (const auto window = fields.any("window")) config.window = window_of(*window);
    config.cache_salt = fields.text("cache_salt").value_or("");
    config.grammar = fields.text("grammar").value_or("");
    if (fields.flag("ignore_eos").value_or(false)) config.eos_ids.emplace();
    chat.profile = fields.text("profile");
    for (const char* knob : {"exact", "tau", "metric", "window"}) {
        if (!names(knob)) continue;
        chat.names_knob = true;
        if (chat.profile) throw Refused(400, std::string("a profile sets ") + knob + "; give one of them", knob);
    }
    if (config.exact.value_or(false) && config.tau) throw Refused(400, "tau and exact exclude each other; give one of them", "tau");
    if (names("metric") && !config.tau) throw Refused(400, "metric says what tau is compared with; give tau, too", "metric");
    chat.stream = fields.flag("stream").value_or(false);
    chat.include_usage = usage_wanted(fields, chat.stream);
    chat.return_steps = fields.flag("return_steps").value_or(false);
    fields.finish();
    return chat;
}

std::optional<double> read_steer(const std::string& body) {
    Fields fields(parse(body));
    const auto tau = fields.number("tau");
    const auto exact = fields.flag("exact");
    fields.finish();
    if (tau.has_value() == exact.has_value() || (exact && !*exact))
        throw Refused(400, "give one of {\"tau\": NUMBER} and {\"exact\": true}", "tau");
    return tau;
}

void check(const mars::Session& session, const mars::GenerationConfig& config) {
    try {
        session.check(config);
    } catch (const mars::SessionError& problem) { // it begins with the name of what is wrong
        const std::string message = problem.what(), field = message.substr(0, message.find(' '));
        throw Refused(400, message, field == "max_new_tokens" ? "max_tokens" : field);
    }
}

Json Steps::shown(const Step& step) {
    Json tokens = Json::array();
    for (const Token& token : step.tokens)
        tokens.push_back({{"id", token.id}, {"text", token.text}, {"p", rounded(token.p, 1e6)}, {"how", token.how}});
    return {{"step", step.number}, {"tokens", std::move(tokens)}};
}

Json Steps::push(const mars::Event& event, std::int64_t verified) {
    if (!event.token_ids.empty()) {
        Step step{number_++, {}, 0};
        const auto is_forced = [&](std::size_t i) {
            return std::find(event.forced.begin(), event.forced.end(), static_cast<std::int64_t>(i)) != event.forced.end();
        };
        std::int64_t own = 0; // tokens that the model chose
        for (std::size_t i = 0; i < event.token_ids.size(); ++i) {
            text_.push(event.token_ids[i]);
            std::string text = text_.read();
            spelled_ += text.size();
            const char* how = is_forced(i) ? "forced" : own++ < verified ? "verified" : "accepted";
            step.tokens.push_back({event.token_ids[i], std::move(text), event.confidences[i], how});
        }
        step.end = spelled_;
        held_.push_back(std::move(step));
    }
    shown_ += event.text.size();
    if (event.finish_reason) return rest();
    Json ready = Json::array();
    // The last token of a step may be a part of a character: its text comes with a later one.
    for (; !held_.empty() && held_.front().end <= shown_ && !held_.front().tokens.back().text.empty(); held_.pop_front())
        ready.push_back(shown(held_.front()));
    return ready;
}

/// What was held, its text cut where the answer ends: before a stop string.
Json Steps::rest() {
    Json all = Json::array();
    if (held_.empty()) return all;
    const std::string tail = text_.finish();
    held_.back().tokens.back().text += tail;
    spelled_ += tail.size();
    for (auto step = held_.rbegin(); step != held_.rend(); ++step)
        for (auto token = step->tokens.rbegin(); token != step->tokens.rend() && spelled_ > shown_; ++token) {
            const std::size_t excess = std::min(spelled_ - shown_, token->text.size());
            token->text.resize(token->text.size() - excess);
            spelled_ -= excess;
        }
    for (const Step& step : held_) all.push_back(shown(step));
    held_.clear();
    return all;
}

Reply::Reply(std::string name, std::string model, std::optional<std::string> profile, mars::GenerationConfig config)
    : id(std::move(name)), model_(std::move(model)), profile_(std::move(profile)), config_(std::move(config)),
      created_(std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count()) {}

Json Reply::head(const char* object) const { return {{"id", id}, {"object", object}, {"created", created_}, {"model", model_}}; }

Json Reply::settings(std::optional<double> tau) const {
    return {{"exact", !tau},
            {"tau", tau ? Json(*tau) : Json()},
            {"metric", to_string(config_.metric)},
            {"profile", profile_ ? Json(*profile_) : Json()},
            {"window", window_shown(config_.window)},
            {"level", nullptr}};
}

void Reply::record(Json& target, const mars::Completion& done, std::optional<double> tau) const {
    const mars::Stats& stats = done.stats;
    target["mars"] = settings(tau);
    target["mars"]["finish_reason"] = to_string(done.finish_reason);
    target["timings"] = {{"prompt_n", stats.prompt_tokens - stats.cached_tokens},
                         {"prompt_ms", rounded(1e3 * stats.prefill_time, 1e3)},
                         {"cached_n", stats.cached_tokens},
                         {"predicted_n", stats.tokens},
                         {"predicted_ms", rounded(1e3 * stats.decode_time, 1e3)},
                         {"predicted_per_second", rounded(stats.tokens_per_second(), 1e3)},
                         {"forwards", stats.forwards},
                         {"tokens_per_forward", rounded(stats.tokens_per_forward(), 1e4)},
                         {"queue_ms", rounded(1e3 * stats.queue_time, 1e3)}};
}

namespace {

Json counts(const mars::Stats& stats) {
    return {
        {"prompt_tokens", stats.prompt_tokens},
        {"completion_tokens", stats.tokens},
        {"total_tokens", stats.prompt_tokens + stats.tokens},
        {"prompt_tokens_details", {{"cached_tokens", stats.cached_tokens}}},
        {"completion_tokens_details", {{"accepted_prediction_tokens", stats.verified}, {"rejected_prediction_tokens", stats.rejected()}}}};
}

} // namespace

Json Reply::body(const mars::Completion& done, std::optional<double> tau) const {
    Json made = head("chat.completion");
    made["choices"] = Json::array({{{"index", 0},
                                    {"message", {{"role", "assistant"}, {"content", done.text}, {"refusal", nullptr}}},
                                    {"logprobs", nullptr},
                                    {"finish_reason", reason_of(done.finish_reason)}}});
    made["usage"] = counts(done.stats);
    record(made, done, tau);
    return made;
}

Json Reply::chunk(Json delta) const {
    Json made = head("chat.completion.chunk");
    made["choices"] = Json::array({{{"index", 0}, {"delta", std::move(delta)}, {"logprobs", nullptr}, {"finish_reason", nullptr}}});
    return made;
}

Json Reply::last(const mars::Completion& done, std::optional<double> tau, bool with_record) const {
    Json made = chunk(Json::object());
    made["choices"][0]["finish_reason"] = reason_of(done.finish_reason);
    if (with_record) record(made, done, tau);
    return made;
}

Json Reply::usage(const mars::Completion& done, std::optional<double> tau) const {
    Json made = head("chat.completion.chunk");
    made["choices"] = Json::array();
    made["usage"] = counts(done.stats);
    record(made, done, tau);
    return made;
}

Json models(const mars::Session& session, const std::string& name, std::int64_t created) {
    const mars::SessionInfo info = session.info();
    const bool samples = std::count(info.outputs.begin(), info.outputs.end(), "logits") > 0;
    const Json mars{{"block", info.block}, {"precision", info.precision}, {"context", info.context_length}, {"profiles", info.profiles},
                    {"sampling", samples}, {"structured", false},         {"variant", info.variant},        {"backend", info.backend}};
    Json list = Json::array();
    std::vector<std::string> names{name};
    for (const std::string& profile : info.profiles) names.push_back(name + ":" + profile);
    for (const std::string& each : names)
        list.push_back({{"id", each}, {"object", "model"}, {"created", created}, {"owned_by", "mars-export"}, {"mars", mars}});
    return {{"object", "list"}, {"data", std::move(list)}};
}

} // namespace openai
