// What a client may ask for: JSON to a prompt and settings, within this service's limits. Knows no HTTP.
#pragma once

#include <string>

#include <mars/session.hpp>

/// The client's mistake; its message goes back with status 400.
struct BadRequest : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Limits {
    std::int64_t new_tokens = 1024;
    std::size_t messages = 1000, stop = 16;
};

struct Request {
    mars::Prompt prompt;
    mars::GenerationConfig config;
    bool stream = false;
};

/// Throws BadRequest for what is no JSON, unknown or of a wrong type, or beyond the limits.
Request parse_request(const std::string& body, const Limits& limits);
