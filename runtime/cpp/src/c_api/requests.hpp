// Converts settings and prompts of C programs to C++.
#pragma once

#include <mars/mars.h>
#include <mars/session.hpp>

namespace mars::c {

struct Request {
    GenerationConfig config;
    Commit commit;
};

mars_session_options default_options();
mars_config default_config();
mars_prompt default_prompt();

/// NULL is the default. Throws ArgumentError.
Session::Options options_of(const mars_session_options* given);

/// NULL is the default. Throws ArgumentError.
Request request_of(const mars_config* given);

/// Chat messages from JSON. Throws SessionError for anything else.
std::vector<Message> messages_of(const char* text);

/// Throws ArgumentError, and SessionError for invalid messages.
Prompt prompt_of(const mars_prompt* given);

} // namespace mars::c
