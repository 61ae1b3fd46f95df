#include "request.hpp"

#include <nlohmann/json.hpp>

namespace {

using Json = nlohmann::json;

constexpr int max_depth = 8; // nesting of lists and objects; copying and printing JSON recurse as deep as it nests

Json parse(const std::string& body) {
    const auto limit = [](int depth, Json::parse_event_t, Json&) {
        if (depth > max_depth) throw BadRequest("lists nested too deep");
        return true;
    };
    return Json::parse(body, limit, false);
}

std::string shown(const Json& value) {
    if (value.is_structured()) return value.is_array() ? "a list" : "an object";
    return value.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 60);
}

template <typename T>
T value_of(const std::string& name, const Json& value, bool good) {
    if (!good) throw BadRequest(name + " has a wrong type: " + shown(value));
    return value.get<T>();
}

std::int64_t integer_of(const std::string& name, const Json& value) {
    const bool fits = !value.is_number_unsigned() || value.get<std::uint64_t>() <= std::uint64_t{1} << 62U;
    return value_of<std::int64_t>(name, value, value.is_number_integer() && fits);
}

std::string text_of(const std::string& name, const Json& value) { return value_of<std::string>(name, value, value.is_string()); }

const Json& list_of(const std::string& name, const Json& value, std::size_t most) {
    if (!value.is_array()) throw BadRequest(name + " has a wrong type: " + shown(value));
    if (value.size() > most) throw BadRequest(name + ": at most " + std::to_string(most) + " here");
    return value;
}

std::vector<mars::Message> messages_of(const Json& value, const Limits& limits) {
    std::vector<mars::Message> messages;
    for (const Json& each : list_of("messages", value, limits.messages)) {
        const bool good = each.is_object() && each.size() == 2 && each.contains("role") && each.contains("content");
        if (!good) throw BadRequest("messages must be a list of {role, content}");
        messages.push_back({text_of("role", each["role"]), text_of("content", each["content"])});
    }
    return messages;
}

std::int64_t window_of(const Json& value) {
    const auto window = mars::window_of(value.is_string() ? value.get<std::string>() : value.is_number_integer() ? value.dump() : "");
    if (!window) throw BadRequest("window must be auto, full or an integer of 1 or more, not " + shown(value));
    return *window;
}

} // namespace

Request parse_request(const std::string& body, const Limits& limits) {
    const Json given = parse(body);
    if (!given.is_object()) throw BadRequest("the body must be a JSON object");
    if (given.contains("prompt") == given.contains("messages")) throw BadRequest("give either prompt or messages");
    Request request;
    auto& config = request.config;
    for (const auto& [name, value] : given.items()) {
        if (name == "prompt")
            request.prompt = text_of(name, value);
        else if (name == "messages")
            request.prompt = messages_of(value, limits);
        else if (name == "stream")
            request.stream = value_of<bool>(name, value, value.is_boolean());
        else if (name == "tau")
            config.tau = value_of<double>(name, value, value.is_number());
        else if (name == "exact")
            config.exact = value_of<bool>(name, value, value.is_boolean());
        else if (name == "window")
            config.window = window_of(value);
        else if (name == "max_new_tokens")
            config.max_new_tokens = integer_of(name, value);
        else if (name == "temperature")
            config.temperature = value_of<double>(name, value, value.is_number());
        else if (name == "seed")
            config.seed = value_of<std::uint64_t>(name, value, value.is_number_unsigned());
        else if (name == "stop")
            for (const Json& word : list_of(name, value, limits.stop)) config.stop.push_back(text_of(name, word));
        else
            throw BadRequest("unknown field " + name.substr(0, 60) +
                             " (known: prompt, messages, stream, exact, tau, window, max_new_tokens, temperature, seed, stop)");
    }
    config = config.repeatable(given.contains("window"), given.contains("seed"));
    if (config.max_new_tokens > limits.new_tokens)
        throw BadRequest("max_new_tokens is at most " + std::to_string(limits.new_tokens) + " here");
    return request;
}
