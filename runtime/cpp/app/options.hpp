// The command line of mars-run, parsed and checked.
#pragma once

#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>

#include <mars/session.hpp>

/// The command line is wrong: exit code 2.
struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Options {
    std::filesystem::path bundle;
    std::optional<std::string> prompt, system, profile;
    std::optional<std::filesystem::path> file;
    bool has_masks = false, has_seed = false, exact = false, raw = false, json = false, runs = false, help = false, version = false,
         token_ids = false;
    mars::GenerationConfig config;
    std::int64_t cache_block = 1;
    mars::Session::Options session;
};

extern const char* const usage;

/// Throws UsageError.
Options parse_options(int argc, char** argv);
