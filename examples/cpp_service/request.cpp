// Requests, field by field: an unknown one is a mistake of the client's, never ignored.
#include "request.hpp"

#include <nlohmann/json.hpp>

namespace {

using Json = nlohmann::json;

template <typename T>
T value_of(const std::string& name, const Json& value, bool good) {
    if (!good) throw BadRequest(name + " has a wrong type: " + value.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 60));
    return value.get<T>();
}

std::vector<mars::Message> messages_of(const Json& value) {
    std::vector<mars::Message> messages;
    for (const Json& each : value_of<std::vector<Json>>("messages", value, value.is_array())) {
        const bool good = each.is_object() && each.size() == 2 && each.contains("role") && each.contains("content");
        if (!good) throw BadRequest("messages must be a list of {role, content}");
        messages.push_back({value_of<std::string>("role", each["role"], each["role"].is_string()),
                            value_of<std::string>("content", each["content"], each["content"].is_string())});
    }
    return messages;
}

} // namespace

Request parse_request(const std::string& body, const Limits& limits) {
    const Json given = Json::parse(body, nullptr, false);
    if (!given.is_object()) throw BadRequest("the body must be a JSON object");
    if (given.contains("prompt") == given.contains("messages")) throw BadRequest("give either prompt or messages");
    Request request;
    auto& config = request.config;
    for (const auto& [name, value] : given.items()) {
        if (name == "prompt")
            request.prompt = value_of<std::string>(name, value, value.is_string());
        else if (name == "messages")
            request.prompt = messages_of(value);
        else if (name == "stream")
            request.stream = value_of<bool>(name, value, value.is_boolean());
        else if (name == "tau")
            config.tau = value_of<double>(name, value, value.is_number());
        else if (name == "max_new_tokens")
            config.max_new_tokens = value_of<std::int64_t>(name, value, value.is_number_integer());
        else if (name == "temperature")
            config.temperature = value_of<double>(name, value, value.is_number());
        else if (name == "seed")
            config.seed = value_of<std::uint64_t>(name, value, value.is_number_unsigned());
        else if (name == "stop")
            for (const Json& word : value_of<std::vector<Json>>(name, value, value.is_array()))
                config.stop.push_back(value_of<std::string>(name, word, word.is_string()));
        else
            throw BadRequest("unknown field " + name + " (known: prompt, messages, stream, tau, max_new_tokens, temperature, seed, stop)");
    }
    if (config.max_new_tokens > limits.new_tokens)
        throw BadRequest("max_new_tokens is at most " + std::to_string(limits.new_tokens) + " here");
    return request;
}
