// What OpenAI's clients ask for: a body to prompts and settings, field by field. Knows no HTTP, runs nothing, answers nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <mars/session.hpp>

namespace openai {

using Json = nlohmann::ordered_json;

/// What a client gets instead of an answer; `param` names the field that is wrong.
struct Refused : std::runtime_error {
    Refused(int code, const std::string& message, std::string field = "", std::string word = "")
        : std::runtime_error(message), status(code), param(std::move(field)), code_word(std::move(word)) {}

    int status;
    std::string param, code_word;
};

/// {"error": {message, type, param, code}}
Json error(int status, const std::string& message, const std::string& param = "", const std::string& code = "");

struct Limits {
    std::int64_t new_tokens = 4096, choices = 16;
    std::size_t messages = 4096, prompts = 16, stop = 16;
};

/// A chat, or the older kind that goes on with a text.
enum class Kind { chat, text };

/// One request: `n` answers to each prompt. `max_tokens`: nothing for as many as there is room; `profile`: also behind the colon of a
/// model's name.
struct Ask {
    Kind kind = Kind::chat;
    std::optional<std::string> model, profile;
    std::vector<mars::Prompt> prompts;
    mars::GenerationConfig config;
    std::optional<std::int64_t> max_tokens;
    std::int64_t n = 1;
    bool stream = false, include_usage = false, return_steps = false, logprobs = false, names_knob = false, has_seed = false,
         has_window = false;
};

/// Throws Refused for the first thing that is wrong, and for fields that would change the answer and are not supported.
Ask read_ask(Kind kind, const std::string& body, const Limits& limits);

/// {"tau": NUMBER} or {"exact": true}, to steer a running stream: the tau, or nothing for exact mode. Throws Refused.
std::optional<double> read_steer(const std::string& body);

/// Checks an ask as the session does. Throws Refused that names the field.
void check(const mars::Session& session, const Ask& ask);

/// What /v1/models lists of a bundle: its name, and its name with each profile that holds.
Json models(const mars::Session& session, const std::string& name, std::int64_t created);

std::string text_of(const Json& value);

} // namespace openai
