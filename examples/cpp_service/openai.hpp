// OpenAI's chat completions: a body to a request, and the JSON that goes back. Knows no HTTP and runs nothing.
#pragma once

#include <cstdint>
#include <deque>
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
    std::int64_t new_tokens = 4096;
    std::size_t messages = 4096, stop = 16;
};

/// One request. `max_tokens`: nothing for as many as there is room; `profile`: also behind the colon of a model's name.
struct Chat {
    std::optional<std::string> model, profile;
    std::vector<mars::Message> messages;
    mars::GenerationConfig config;
    std::optional<std::int64_t> max_tokens;
    bool stream = false, include_usage = false, return_steps = false, names_knob = false;
};

/// Throws Refused for the first thing that is wrong, and for fields that would change the answer and are not supported.
Chat read_chat(const std::string& body, const Limits& limits);

/// {"tau": NUMBER} or {"exact": true}, to steer a running stream: the tau, or nothing for exact mode. Throws Refused.
std::optional<double> read_steer(const std::string& body);

/// Checks a config as the session does. Throws Refused that names the field.
void check(const mars::Session& session, const mars::GenerationConfig& config);

/// Which tokens came in which step, with the text of each: their texts joined are the answer's. A step is handed out once all its text
/// was shown.
class Steps {
  public:
    explicit Steps(mars::TextStream text) : text_(std::move(text)) {}

    /// Take in an event, of which `verified` tokens were proposals that held; the steps that are complete now.
    Json push(const mars::Event& event, std::int64_t verified);

  private:
    struct Token {
        std::int64_t id;
        std::string text;
        double p;
        const char* how;
    };
    struct Step {
        std::int64_t number;
        std::vector<Token> tokens;
        std::size_t end; // where its text ends in the answer's
    };

    static Json shown(const Step& step);
    Json rest();

    mars::TextStream text_;
    std::deque<Step> held_;
    std::size_t spelled_ = 0, shown_ = 0;
    std::int64_t number_ = 0;
};

/// One answer on its way: what its body or its chunks have in common.
class Reply {
  public:
    Reply(std::string id, std::string model, std::optional<std::string> profile, mars::GenerationConfig config);

    const std::string id;

    /// A whole body.
    Json body(const mars::Completion& done, std::optional<double> tau) const;

    Json chunk(Json delta) const;
    Json last(const mars::Completion& done, std::optional<double> tau, bool with_record) const;
    Json usage(const mars::Completion& done, std::optional<double> tau) const;

    /// What holds: exact, tau, metric, profile, window, level.
    Json settings(std::optional<double> tau) const;

  private:
    Json head(const char* object) const;
    void record(Json& target, const mars::Completion& done, std::optional<double> tau) const;

    std::string model_;
    std::optional<std::string> profile_;
    mars::GenerationConfig config_;
    std::int64_t created_;
};

/// What /v1/models lists of a bundle: its name, and its name with each profile that holds.
Json models(const mars::Session& session, const std::string& name, std::int64_t created);

std::string text_of(const Json& value);

} // namespace openai
