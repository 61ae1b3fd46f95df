// Parses the JSON body of /generate into a prompt and settings.
#pragma once

#include <string>

#include <mars/session.hpp>

/// A mistake of the client; the message is sent back with status 400.
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

/// Throws BadRequest for invalid JSON, unknown fields, wrong types, and values beyond the limits.
Request parse_request(const std::string& body, const Limits& limits);
