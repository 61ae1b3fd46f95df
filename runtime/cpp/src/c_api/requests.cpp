// No Python file: converts settings and prompts of C programs to C++.
#include <cstdint>
#include <cstring>

#include <mars/errors.hpp>

#include "bundle/fields.hpp"
#include "c_api/handles.hpp"

namespace mars::c {

namespace {

// Enumerations of both interfaces have the same values, so that a cast converts them.
static_assert(MARS_MASKS_AUTO == auto_masks && MARS_MASKS_FULL == all_masks);
static_assert(MARS_VERIFY_ALWAYS == static_cast<int>(Verify::always) && MARS_VERIFY_NEVER == static_cast<int>(Verify::never));
static_assert(MARS_LOG_DEBUG == static_cast<int>(LogLevel::debug) && MARS_LOG_ERROR == static_cast<int>(LogLevel::error));
static_assert(MARS_MARGIN == static_cast<int>(Metric::margin) && MARS_ENTROPY == static_cast<int>(Metric::entropy));

mars_session_options default_options() {
    mars_session_options values{};
    values.struct_size = sizeof values;
    values.cache_bytes = MARS_CACHE_AUTO;
    values.prefill_tokens = Session::Options().prefill_tokens;
    return values;
}

/// Copy the settings that both interfaces have as the same numbers.
template <typename Target, typename Source>
void copy_numbers(Target& target, const Source& source) {
    target.max_new_tokens = source.max_new_tokens;
    target.masks = source.masks;
    target.masks_of_tau = source.masks_of_tau;
    target.temperature = source.temperature;
    target.top_k = source.top_k;
    target.top_p = source.top_p;
    target.seed = source.seed;
    target.repetition_penalty = source.repetition_penalty;
    target.prompt_lookup = source.prompt_lookup;
    target.min_p = source.min_p;
}

mars_prompt default_prompt() { return {sizeof(mars_prompt), nullptr, SIZE_MAX, nullptr, nullptr, 0}; }

} // namespace

Session::Options options_of(const mars_session_options* options) {
    const mars_session_options given = known(options, default_options(), "options");
    if (given.verify < MARS_VERIFY_ONCE || given.verify > MARS_VERIFY_NEVER)
        throw ArgumentError("verify: not a mars_verify: " + std::to_string(given.verify));
    Session::Options wanted;
    if (given.device != nullptr) wanted.device = given.device;
    if (given.threads != 0) wanted.threads = given.threads;
    if (given.variant != nullptr) wanted.variant = given.variant;
    wanted.verify = static_cast<Verify>(given.verify);
    wanted.safe = given.safe != 0;
    wanted.parse_special = given.parse_special != 0;
    wanted.cuda_stream = given.cuda_stream;
    wanted.prefill_tokens = given.prefill_tokens;
    if (given.cache_bytes != MARS_CACHE_AUTO) wanted.cache_bytes = given.cache_bytes;
    for (std::size_t i = 0; i < given.num_options; ++i) {
        const char* const name = (&needed(given.option_names, "option_names"))[i];
        const char* const value = (&needed(given.option_values, "option_values"))[i];
        wanted.options[&needed(name, "a name of option_names")] = &needed(value, "a value of option_values");
    }
    if (given.on_log != nullptr)
        wanted.on_log = [call = given.on_log, user = given.log_user](LogLevel level, std::string_view line) {
            call(static_cast<std::int32_t>(level), std::string(line).c_str(), user);
        };
    return wanted;
}

mars_config default_config() {
    mars_config values{};
    values.struct_size = sizeof values;
    values.tau = MARS_EXACT;
    values.cache_block = Request().cache_block;
    copy_numbers(values, GenerationConfig());
    return values;
}

Request request_of(const mars_config* given) {
    const mars_config config = known(given, default_config(), "config");
    if (config.metric < MARS_PROBABILITY || config.metric > MARS_ENTROPY) throw ArgumentError("config: metric is not a mars_metric");
    if (config.num_eos_ids > 0 && config.eos_ids == nullptr) throw ArgumentError("config: num_eos_ids without eos_ids");
    if (config.num_stop > 0 && config.stop == nullptr) throw ArgumentError("config: num_stop without stop");
    Request request;
    if (config.tau != MARS_EXACT) request.config.tau = config.tau;
    request.config.metric = static_cast<Metric>(config.metric);
    copy_numbers(request.config, config);
    if (config.eos_ids != nullptr) request.config.eos_ids.emplace(config.eos_ids, config.eos_ids + config.num_eos_ids);
    for (std::size_t i = 0; i < config.num_stop; ++i) request.config.stop.emplace_back(&needed(config.stop[i], "config: a stop string"));
    if (config.deadline != 0) request.config.deadline = config.deadline;
    if (config.cache_salt != nullptr) request.config.cache_salt = config.cache_salt;
    if (config.grammar != nullptr) request.config.grammar = config.grammar;
    request.cache_block = config.cache_block;
    return request;
}

std::vector<Message> messages_of(const char* text) {
    nlohmann::json value;
    try {
        value = parse_json(text);
    } catch (const std::exception& error) {
        throw SessionError(std::string("messages must be a JSON list of {role, content}: ") + error.what());
    }
    std::vector<Message> messages;
    if (!value.is_array()) value = nlohmann::json::array();
    for (const auto& each : value) {
        const bool good = each.is_object() && each.contains("role") && each.contains("content") && each["role"].is_string() &&
                          each["content"].is_string();
        if (!good) throw SessionError("messages must be a JSON list of {role, content}; wrong: " + std::to_string(messages.size()));
        messages.push_back({each["role"], each["content"]});
    }
    if (messages.empty()) throw SessionError("messages must be a JSON list of {role, content}, and not empty");
    return messages;
}

Prompt prompt_of(const mars_prompt* given) {
    const mars_prompt prompt = known(&needed(given, "prompt"), default_prompt(), "prompt");
    if ((prompt.text != nullptr) + (prompt.messages != nullptr) + (prompt.token_ids != nullptr) != 1)
        throw ArgumentError("prompt: set exactly one of text, messages and token_ids");
    if (prompt.text != nullptr) return std::string(prompt.text, prompt.text_size != SIZE_MAX ? prompt.text_size : std::strlen(prompt.text));
    if (prompt.messages != nullptr) return messages_of(prompt.messages);
    return std::vector<std::int64_t>(prompt.token_ids, prompt.token_ids + prompt.num_token_ids);
}

} // namespace mars::c

void mars_session_options_init(mars_session_options* options, size_t struct_size) {
    mars::c::init(options, struct_size, mars::c::default_options());
}

void mars_config_init(mars_config* config, size_t struct_size) { mars::c::init(config, struct_size, mars::c::default_config()); }
void mars_prompt_init(mars_prompt* prompt, size_t struct_size) { mars::c::init(prompt, struct_size, mars::c::default_prompt()); }
