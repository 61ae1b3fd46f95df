// mars-run, the command line of libmars: the options and output of `mars-export generate`.
#include <cmath>
#include <csignal>
#include <fstream>
#include <iostream>
#include <iterator>
#include <new>
#include <sstream>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include <mars/mars.h>
#include <mars/session.hpp>

#include "options.hpp"

namespace {

volatile std::sig_atomic_t interrupted = 0;

void interrupt(int) { interrupted = 1; }

std::string prompt_text(const Options& options) {
    if (options.prompt && options.file) throw UsageError("give the prompt with --prompt or with --file, not both");
    if (options.prompt && *options.prompt != "-") return *options.prompt;
    if (options.file) {
        std::ifstream file(*options.file, std::ios::binary);
        std::ostringstream text;
        if (!file || !(text << file.rdbuf())) throw UsageError(options.file->string() + ": not a readable file, or empty");
        return text.str();
    }
    if (isatty(STDIN_FILENO) != 0) std::cerr << "Reading the prompt from standard input; end it with Ctrl-D.\n";
    return {std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()};
}

mars::Prompt prompt_of(const Options& options) {
    const std::string text = prompt_text(options);
    if (options.token_ids) {
        std::istringstream words(text);
        std::vector<std::int64_t> ids{std::istream_iterator<std::int64_t>(words), {}};
        if (!words.eof()) throw UsageError("--token-ids: the prompt must be whole numbers separated by blanks");
        return ids;
    }
    if (options.raw) return text;
    std::vector<mars::Message> messages;
    if (options.system) messages.push_back({"system", *options.system});
    messages.push_back({"user", text});
    return messages;
}

nlohmann::ordered_json masks_shown(std::int64_t masks) {
    if (masks == mars::auto_masks) return "auto";
    if (masks == mars::all_masks) return "full";
    return masks;
}

void print_json(const mars::Completion& done, const mars::GenerationConfig& config) {
    const mars::Stats& stats = done.stats;
    nlohmann::ordered_json accepted = nlohmann::ordered_json::object(), confidences = nlohmann::ordered_json::array();
    for (const auto& [tokens, steps] : stats.accepted) accepted[std::to_string(tokens)] = steps;
    for (const double confidence : done.confidences) confidences.push_back(std::round(confidence * 1e6) / 1e6);
    const nlohmann::ordered_json value{{"text", done.text},
                                       {"token_ids", done.token_ids},
                                       {"confidences", confidences},
                                       {"finish_reason", to_string(done.finish_reason)},
                                       {"exact", config.is_exact()},
                                       {"tau", config.is_exact() ? nlohmann::ordered_json() : nlohmann::ordered_json(config.bound())},
                                       {"masks", masks_shown(config.masks)},
                                       {"stats",
                                        {{"prompt_tokens", stats.prompt_tokens},
                                         {"cached_tokens", stats.cached_tokens},
                                         {"tokens", stats.tokens},
                                         {"forwards", stats.forwards},
                                         {"prefill_forwards", stats.prefill_forwards},
                                         {"queue_time", stats.queue_time},
                                         {"prefill_time", stats.prefill_time},
                                         {"decode_time", stats.decode_time},
                                         {"time_to_first_token", stats.time_to_first_token},
                                         {"tokens_after_first", stats.tokens_after_first},
                                         {"draft_tokens", stats.draft_tokens},
                                         {"accepted_draft_tokens", stats.accepted_draft_tokens},
                                         {"forced", stats.forced},
                                         {"accepted", accepted},
                                         {"rejected_draft_tokens", stats.rejected_draft_tokens()},
                                         {"tokens_per_forward", stats.tokens_per_forward()},
                                         {"tokens_per_second", stats.tokens_per_second()}}}};
    std::cout << value.dump() << std::endl;
}

void print_summary(const mars::Completion& done) {
    const mars::Stats& stats = done.stats;
    std::cerr.precision(2);
    if (stats.cached_tokens > 0) std::cerr << stats.cached_tokens << " of " << stats.prompt_tokens << " prompt tokens from cache, ";
    std::cerr << std::fixed << stats.tokens << " tokens, " << stats.tokens_per_forward() << " tokens/forward, ";
    std::cerr.precision(1);
    std::cerr << stats.tokens_per_second() << " tokens/s, first token after ";
    std::cerr.precision(2);
    std::cerr << stats.time_to_first_token << " s, ended by " << to_string(done.finish_reason) << "\n";
}

void print_version() {
    std::cout << "mars-run " << mars_version() << "\n";
    try {
        std::cout << "ONNX Runtime " << mars::onnxruntime_library() << "\n";
    } catch (const mars::SessionError& error) { // a device that runs engines needs none
        std::cout << error.what() << "\n";
    }
}

int answer(const Options& options) {
    options.config.check();
    const mars::Prompt prompt = prompt_of(options);
    const mars::Session session = mars::Session::open(options.bundle, options.session);
    mars::GenerationConfig config = options.config;
    if (options.profile) config = config.with_profile(session.config_of_profile(*options.profile));
    config = config.repeatable(options.has_masks, options.has_seed);
    mars::Stream stream = session.stream(prompt, config, options.cache_block);
    std::signal(SIGINT, interrupt);
    bool odd = false;
    while (const std::optional<mars::Event> event = stream.next()) {
        if (interrupted != 0) stream.cancel();
        if (options.json || (event->token_ids.empty() && !event->finish_reason)) continue;
        const bool mark = options.runs && odd && !event->text.empty();
        std::cout << (mark ? "\x1b[7m" : "") << event->text << (mark ? "\x1b[0m" : "") << std::flush;
        odd = !odd;
        if (!std::cout) return 0; // the reader closed the pipe, as in `| head`
    }
    const mars::Completion done = stream.completion();
    if (options.json) {
        print_json(done, config);
    } else {
        std::cout << std::endl;
        print_summary(done);
    }
    if (done.finish_reason == mars::FinishReason::capacity)
        throw mars::Error("the context of " + std::to_string(session.info().context_length) +
                          " tokens is full; the answer above is cut short. Shorten the prompt");
    return done.finish_reason == mars::FinishReason::cancelled ? 130 : 0;
}

} // namespace

int main(int argc, char** argv) {
    std::signal(SIGPIPE, SIG_IGN);
    try {
        const Options options = parse_options(argc, argv);
        if (options.help) {
            std::cout << usage;
            return 0;
        }
        if (options.version) {
            print_version();
            return 0;
        }
        return answer(options);
    } catch (const UsageError& error) {
        std::cerr << "mars-run: " << error.what() << " (mars-run --help)\n";
        return 2;
    } catch (const std::bad_alloc&) {
        std::cerr << "error: not enough memory; shorten the prompt, or free memory\n";
        return 1;
    } catch (const mars::Error& error) {
        std::cerr << "error: " << error.what() << "\n";
        return *error.field == '\0' ? 1 : 2;
    } catch (const std::exception& error) {
        std::cerr << "error: " << error.what() << "\n";
        return 1;
    }
}
