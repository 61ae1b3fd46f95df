// Parses OpenAI's request bodies into prompts and settings.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <mars/errors.hpp>
#include <mars/session.hpp>

namespace openai {

using Json = nlohmann::ordered_json;

/// A chat, or the older completion of a text.
enum class Kind { chat, text };

/// The error that a client receives; `param` names the wrong field.
struct Refused : std::runtime_error {
    Refused(int code, const std::string& message, std::string field = "", std::string word = "")
        : std::runtime_error(message), status(code), param(std::move(field)), code_word(std::move(word)) {}

    int status;
    std::string param, code_word;
};

/// The refusal of a request for the library's reason.
Refused refusal(const mars::Error& problem, Kind kind);

/// {"error": {message, type, param, code}}; without a code, that of the status
Json error(int status, const std::string& message, const std::string& param = "", const std::string& code = "");

struct Limits {
    std::int64_t new_tokens = 4096, choices = 16;
    std::size_t messages = 4096, prompts = 16, stop = 16;
};

/// One request: `n` answers to each prompt. `max_tokens`: no value means as many as fit. `profile` may also come from
/// the model's name, NAME:PROFILE. `thinking`: whether the model is to think, set by the field `thinking_field`.
struct ApiRequest {
    Kind kind = Kind::chat;
    std::optional<std::string> model, profile;
    std::vector<mars::Prompt> prompts;
    mars::GenerationConfig config;
    std::optional<std::int64_t> max_tokens;
    std::optional<bool> thinking;
    std::string thinking_field;
    std::int64_t n = 1;
    bool stream = false, include_usage = false, return_steps = false, names_tau_setting = false, has_seed = false, has_masks = false;
};

/// Throws Refused for the first problem, and for unsupported fields that would change the answer.
ApiRequest read_request(Kind kind, const std::string& body, const Limits& limits);

/// Turns thinking on or off in the prompt. Throws Refused if the bundle cannot.
void switch_thinking(const mars::Session& session, ApiRequest& api_request);

/// Checks a request as the session does. Throws Refused that names the field.
void check(const mars::Session& session, const ApiRequest& api_request);

/// The answer of /v1/models: the bundle's name, and its name with each valid profile.
Json models(const mars::Session& session, const std::string& name, std::int64_t created);

std::string text_of(const Json& value);

} // namespace openai
