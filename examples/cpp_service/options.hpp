// The command line of the service.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <mars/batcher.hpp>

struct Options {
    std::string bundle;
    int port = 8080;
    std::optional<int> threads;
    std::string device = "cpu";
    double grace = 5.0; ///< seconds that running answers get when the service stops
    std::optional<std::string> key_file;
    mars::Limits limits;
    bool parse_special = false;
};

constexpr const char* usage = R"(usage: service BUNDLE [PORT [THREADS]] [OPTION VALUE]...
  --rows N            answers that are computed at once, as rows of one batch (8, or as many as an engine was built for)
  --waiting N         requests that wait for a row; further ones get 429 (16)
  --kv-mb N           memory for KV entries of running answers; no limit
  --client-share X    of all places what one client may have, above 0, at most 1 (1); an API key is one, without keys an address
  --rows-per-client N of the rows, what one client may have at once; no limit
  --device NAME       cpu, or cuda for a GPU, cuda:1 for the second (cpu)
  --grace SECONDS     for running answers, after SIGTERM (5)
  --parse-special N   1: a special token's text, such as <|im_end|>, is that token inside messages, too (0)
  --api-key-file FILE keys, one a line, of which each request but /health needs one
)";

/// Throws std::invalid_argument.
inline Options options_of(const std::vector<std::string>& words) {
    Options options;
    options.limits.max_waiting = 16;
    const auto number = [](const std::string& text) {
        std::size_t end = 0;
        const double value = std::stod(text, &end);
        if (end != text.size() || !(value >= 0 && value < 1e15)) throw std::invalid_argument(text);
        return value;
    };
    const auto whole = [&](const std::string& text) { return static_cast<std::int64_t>(number(text)); };
    int place = 0;
    for (std::size_t i = 0; i < words.size(); ++i) {
        const std::string& word = words[i];
        if (word.rfind("--", 0) != 0) {
            ++place;
            if (place == 1)
                options.bundle = word;
            else if (place == 2)
                options.port = static_cast<int>(whole(word));
            else if (place == 3)
                options.threads = static_cast<int>(whole(word));
            else
                throw std::invalid_argument(word);
            continue;
        }
        if (++i == words.size()) throw std::invalid_argument(word);
        if (word == "--device")
            options.device = words[i];
        else if (word == "--rows")
            options.limits.max_rows = whole(words[i]);
        else if (word == "--waiting")
            options.limits.max_waiting = whole(words[i]);
        else if (word == "--kv-mb")
            options.limits.kv_bytes = whole(words[i]) * 1000000;
        else if (word == "--client-share")
            options.limits.client_share = number(words[i]);
        else if (word == "--rows-per-client")
            options.limits.max_rows_per_client = whole(words[i]);
        else if (word == "--grace")
            options.grace = number(words[i]);
        else if (word == "--api-key-file")
            options.key_file = words[i];
        else if (word == "--parse-special")
            options.parse_special = whole(words[i]) != 0;
        else
            throw std::invalid_argument(word);
    }
    if (place == 0) throw std::invalid_argument("no bundle");
    return options;
}
