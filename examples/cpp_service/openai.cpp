// Takes fields one by one and checks their types; unknown ones are refused by name at the end.
#include "openai.hpp"

#include <algorithm>
#include <map>
#include <set>

#include <mars/errors.hpp>

namespace openai {

namespace {

constexpr int max_depth = 32;            // nesting of lists and objects
constexpr std::int64_t text_tokens = 16; // default of a text completion, as at OpenAI

// Fields that no answer depends on.
const std::set<std::string> harmless{
    "user",       "metadata",          "store",    "service_tier",       "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "timings_per_token", "priority", "parallel_tool_calls"};

// Unsupported fields that would change the answer, with the value that changes nothing.
const std::map<std::string, Json> neutral{{"presence_penalty", 0},
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
                                          {"best_of", 1},
                                          {"echo", false},
                                          {"suffix", ""}};

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

    /// Fields that were not taken must be harmless or neutral.
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
        const std::string role = each["role"].get<std::string>();
        messages.push_back({role == "developer" ? "system" : role, content_of(where, each.value("content", Json()))});
    }
    return messages;
}

std::vector<std::int64_t> ids_of(const Json& value) {
    std::vector<std::int64_t> ids;
    for (const Json& each : value) ids.push_back(each.get<std::int64_t>());
    return ids;
}

bool are_ids(const Json& value) {
    return value.is_array() && !value.empty() &&
           std::all_of(value.begin(), value.end(), [](const Json& each) { return each.is_number_integer(); });
}

/// One prompt or several, each a text or token ids.
std::vector<mars::Prompt> prompts_of(const std::optional<Json>& value, const Limits& limits) {
    const std::string what = "a text, a list of token ids, or a list of 1 to " + std::to_string(limits.prompts) + " of these";
    if (!value) throw Refused(400, "prompt must be " + what, "prompt");
    if (value->is_string()) return {value->get<std::string>()};
    if (are_ids(*value)) return {ids_of(*value)};
    std::vector<mars::Prompt> prompts;
    const bool is_list = value->is_array() && !value->empty() && value->size() <= limits.prompts;
    for (const Json& each : is_list ? *value : Json::array()) {
        if (each.is_string())
            prompts.emplace_back(each.get<std::string>());
        else if (are_ids(each))
            prompts.emplace_back(ids_of(each));
        else
            wrong("prompt", what, each);
    }
    const auto is_text = [](const mars::Prompt& each) { return each.text() != nullptr; };
    const auto num_texts = std::count_if(prompts.begin(), prompts.end(), is_text);
    const bool is_one_kind = num_texts == 0 || static_cast<std::size_t>(num_texts) == prompts.size();
    if (prompts.empty() || !is_one_kind) wrong("prompt", what, *value);
    return prompts;
}

/// `enable_thinking`, the only variable of the chat template that can be set, or an effort of "none".
void read_thinking(Fields& fields, ApiRequest& api_request) {
    static const std::set<std::string> efforts{"none", "minimal", "low", "medium", "high", "xhigh"};
    if (const auto effort = fields.text("reasoning_effort")) {
        if (efforts.count(*effort) == 0) wrong("reasoning_effort", "none, minimal, low, medium, high or xhigh", *effort);
        api_request.thinking_field = "reasoning_effort";
        if (*effort == "none") api_request.thinking = false;
    }
    const auto variables = fields.any("chat_template_kwargs");
    if (!variables) return;
    api_request.thinking_field = "chat_template_kwargs";
    if (!variables->is_object()) wrong(api_request.thinking_field, "an object", *variables);
    for (const auto& [name, value] : variables->items()) {
        if (name != "enable_thinking" || !value.is_boolean())
            throw Refused(400, "chat_template_kwargs: only enable_thinking, true or false, is supported here", api_request.thinking_field);
        api_request.thinking = value.get<bool>();
    }
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

std::int64_t masks_of(const Json& value) {
    const auto masks = mars::masks_of(value.is_string() ? value.get<std::string>() : value.is_number_integer() ? value.dump() : "");
    if (!masks) wrong("masks", "auto, full or an integer of 0 or more", value);
    return *masks;
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

} // namespace

std::string text_of(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

Refused refusal(const mars::Error& problem, Kind kind) {
    std::string field = problem.field;
    if (field.empty() || field == "prompt") field = kind == Kind::chat ? "messages" : "prompt";
    return {400, problem.what(), field == "max_new_tokens" ? "max_tokens" : field, problem.code};
}

Json error(int status, const std::string& message, const std::string& param, const std::string& code) {
    const char* type = status == 401   ? "authentication_error"
                       : status == 404 ? "not_found_error"
                       : status == 429 ? "rate_limit_error"
                       : status == 503 ? "service_unavailable_error"
                       : status < 500  ? "invalid_request_error"
                                       : "server_error";
    const auto or_null = [](const std::string& text) { return text.empty() ? Json() : Json(text); };
    const std::string word = code.empty() && status == 400 ? "invalid_value" : code;
    return {{"error", {{"message", message}, {"type", type}, {"param", or_null(param)}, {"code", or_null(word)}}}};
}

ApiRequest read_request(Kind kind, const std::string& body, const Limits& limits) {
    const Json given = parse(body);
    const auto names = [&](const char* name) { return given.contains(name) && !given[name].is_null(); };
    Fields fields(given);
    ApiRequest api_request;
    api_request.kind = kind;
    auto& config = api_request.config;
    api_request.model = fields.text("model");
    if (kind == Kind::chat) {
        api_request.prompts.emplace_back(messages_of(fields.any("messages"), limits));
        const auto old_most = fields.integer("max_tokens");
        const auto new_most = fields.integer("max_completion_tokens");
        api_request.max_tokens = new_most ? new_most : old_most;
        read_thinking(fields, api_request);
    } else {
        api_request.prompts = prompts_of(fields.any("prompt"), limits);
        api_request.max_tokens = fields.integer("max_tokens").value_or(text_tokens);
    }
    if (api_request.max_tokens && (*api_request.max_tokens < 1 || *api_request.max_tokens > limits.new_tokens))
        wrong("max_tokens", "an integer of 1 to " + std::to_string(limits.new_tokens), *api_request.max_tokens);
    api_request.n = fields.integer("n").value_or(1);
    if (api_request.n < 1 || api_request.n > limits.choices) wrong("n", "1 to " + std::to_string(limits.choices), api_request.n);
    config.temperature = fields.number("temperature").value_or(config.temperature);
    config.top_p = fields.number("top_p").value_or(config.top_p);
    config.top_k = std::max(fields.integer("top_k").value_or(config.top_k), std::int64_t{-1});
    if (config.top_k == -1) config.top_k = 0; // off, as some clients write it
    config.min_p = fields.number("min_p").value_or(config.min_p);
    config.repetition_penalty = fields.number("repetition_penalty").value_or(config.repetition_penalty);
    api_request.has_seed = names("seed");
    if (const auto seed = fields.any("seed")) config.seed = seed_of(*seed);
    config.stop = stops_of(fields.any("stop"), limits);
    config.prompt_lookup = fields.integer("prompt_lookup").value_or(config.prompt_lookup);
    config.exact = fields.flag("exact");
    config.tau = fields.number("tau");
    if (const auto metric = fields.text("metric")) config.metric = metric_of(*metric);
    api_request.has_masks = names("masks");
    if (const auto masks = fields.any("masks")) config.masks = masks_of(*masks);
    config.cache_salt = fields.text("cache_salt").value_or("");
    config.grammar = fields.text("grammar").value_or("");
    if (fields.flag("ignore_eos").value_or(false)) config.eos_ids.emplace();
    api_request.profile = fields.text("profile");
    for (const char* tau_setting : {"exact", "tau", "metric", "masks"}) {
        if (!names(tau_setting)) continue;
        api_request.names_tau_setting = true;
        if (api_request.profile) throw Refused(400, std::string("a profile sets ") + tau_setting + "; give one of them", tau_setting);
    }
    if (config.exact.value_or(false) && config.tau) throw Refused(400, "tau and exact exclude each other; give one of them", "tau");
    if (names("metric") && !config.tau) throw Refused(400, "metric says what tau is compared with; give tau, too", "metric");
    api_request.stream = fields.flag("stream").value_or(false);
    api_request.include_usage = usage_wanted(fields, api_request.stream);
    api_request.return_steps = fields.flag("return_steps").value_or(false);
    fields.finish();
    return api_request;
}

void switch_thinking(const mars::Session& session, ApiRequest& api_request) {
    if (!api_request.thinking) return;
    const mars::SessionInfo info = session.info();
    if (info.switches_thinking)
        api_request.prompts.front() = mars::Prompt(*api_request.prompts.front().messages(), api_request.thinking);
    else if (api_request.thinking_field == "chat_template_kwargs" || *api_request.thinking != info.has_thinking)
        throw Refused(400, "this bundle cannot turn thinking on or off without its chat template", api_request.thinking_field,
                      "unsupported_by_model");
}

void check(const mars::Session& session, const ApiRequest& api_request) {
    try {
        session.check(api_request.config);
    } catch (const mars::SessionError& problem) {
        throw refusal(problem, api_request.kind);
    }
}

Json models(const mars::Session& session, const std::string& name, std::int64_t created) {
    const mars::SessionInfo info = session.info();
    const bool samples = std::count(info.outputs.begin(), info.outputs.end(), "logits") > 0;
    Json mars{{"block", info.block},           {"precision", info.precision}, {"context", info.context_length},
              {"profiles", info.profiles},     {"sampling", samples},         {"structured", false},
              {"thinking", info.has_thinking}, {"variant", info.variant},     {"backend", info.backend}};
    Json list = Json::array();
    std::vector<std::string> names{name};
    for (const std::string& profile : info.profiles) names.push_back(name + ":" + profile);
    for (const std::string& each : names)
        list.push_back({{"id", each}, {"object", "model"}, {"created", created}, {"owned_by", "mars-export"}, {"mars", mars}});
    return {{"object", "list"}, {"data", std::move(list)}};
}

} // namespace openai
