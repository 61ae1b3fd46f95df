// The C interface over the C++ one: handles, struct sizes, and a wall that no exception crosses.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include <nlohmann/json.hpp>

#include <mars/mars.h>
#include <mars/session.hpp>

#include "utf8.hpp"

#ifndef MARS_VERSION
#error "the build defines MARS_VERSION"
#endif

struct mars_error {
    mars_status status;
    std::string message;
};

struct mars_session {
    mars::Session session;
};

struct mars_completion {
    explicit mars_completion(mars::Completion completion) : done(std::move(completion)) {
        if (!done.stats.accepted.empty()) accepted.resize(static_cast<std::size_t>(done.stats.accepted.rbegin()->first) + 1);
        for (const auto& [tokens, steps] : done.stats.accepted) accepted[static_cast<std::size_t>(tokens)] = steps;
    }

    mars::Completion done;
    std::vector<std::int64_t> accepted; // the stats' counts by index
};

struct mars_stream {
    mars::Stream stream;
    mars::Event event; // the one that the caller holds
};

namespace {

/// The interface was used wrongly.
struct ArgumentError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

mars_status fail(mars_error** error, mars_status status, const char* message) noexcept {
    if (error != nullptr) {
        *error = new (std::nothrow) mars_error{status, {}};
        try {
            if (*error != nullptr) (*error)->message = mars::utf8::lossy(message); // it may quote a damaged file
        } catch (...) {                                                            // no memory for the message: the status says enough
        }
    }
    return status;
}

/// Run `body`; whatever it throws becomes a status and a message.
template <typename Body>
mars_status guarded(mars_error** error, const Body& body) noexcept {
    if (error != nullptr) *error = nullptr;
    try {
        body();
        return MARS_OK;
    } catch (const mars::BundleError& problem) {
        return fail(error, MARS_ERROR_BUNDLE, problem.what());
    } catch (const mars::Error& problem) {
        return fail(error, MARS_ERROR_SESSION, problem.what());
    } catch (const ArgumentError& problem) {
        return fail(error, MARS_ERROR_ARGUMENT, problem.what());
    } catch (const std::bad_alloc&) {
        return fail(error, MARS_ERROR_MEMORY, "out of memory");
    } catch (const std::exception& problem) {
        return fail(error, MARS_ERROR_INTERNAL, problem.what());
    } catch (...) {
        return fail(error, MARS_ERROR_INTERNAL, "an exception that is no std::exception, perhaps of the callback");
    }
}

template <typename T>
T& needed(T* pointer, const char* name) {
    if (pointer == nullptr) throw ArgumentError(std::string(name) + " must not be NULL");
    return *pointer;
}

/// Write `values` to the caller's struct as far as that reaches; its struct_size stays.
template <typename T>
void fill(T* target, const T& values, const char* name) {
    const std::size_t size = needed(target, name).struct_size;
    if (size < sizeof(std::size_t)) throw ArgumentError(std::string(name) + ": set struct_size to the size of the struct");
    std::memcpy(target, &values, std::min(size, sizeof(T)));
    target->struct_size = size;
}

template <typename T>
void init(T* target, std::size_t struct_size, const T& defaults) noexcept {
    if (target == nullptr || struct_size < sizeof(std::size_t)) return;
    std::memset(target, 0, struct_size);
    std::memcpy(target, &defaults, std::min(struct_size, sizeof(T)));
    target->struct_size = struct_size;
}

/// The caller's struct as this library knows it: what an older one lacks is the default, what a newer one has more must be zero.
template <typename T>
T known(const T* given, const T& defaults, const char* name) {
    if (given == nullptr) return defaults;
    if (given->struct_size < sizeof(std::size_t)) throw ArgumentError(std::string(name) + ": set struct_size to the size of the struct");
    const auto* bytes = reinterpret_cast<const unsigned char*>(given);
    for (std::size_t i = sizeof(T); i < given->struct_size; ++i)
        if (bytes[i] != 0)
            throw ArgumentError(std::string(name) + ": a setting that libmars " MARS_VERSION " does not know; update libmars");
    T values = defaults;
    std::memcpy(&values, given, std::min(given->struct_size, sizeof(T)));
    return values;
}

const mars_session_options default_options{sizeof(mars_session_options), nullptr, 0, 0, nullptr};
const mars_prompt default_prompt{sizeof(mars_prompt), nullptr, 0, nullptr, nullptr, 0};

mars_config default_config() {
    const mars::GenerationConfig config;
    const mars::Commit commit;
    return {sizeof(mars_config),
            config.tau,
            MARS_PROBABILITY,
            MARS_COMMIT_CURSOR,
            commit.cache_block,
            config.max_new_tokens,
            0,
            nullptr,
            0,
            nullptr,
            0,
            config.temperature,
            config.top_k,
            config.top_p,
            config.seed,
            config.repetition_penalty};
}

struct Request {
    mars::GenerationConfig config;
    mars::Commit commit;
};

Request request_of(const mars_config* given) {
    const mars_config config = known(given, default_config(), "config");
    if (config.metric < MARS_PROBABILITY || config.metric > MARS_ENTROPY) throw ArgumentError("config: metric is no mars_metric");
    if (config.commit < MARS_COMMIT_CURSOR || config.commit > MARS_COMMIT_BLOCK) throw ArgumentError("config: commit is no mars_commit");
    if (config.num_eos_ids > 0 && config.eos_ids == nullptr) throw ArgumentError("config: num_eos_ids without eos_ids");
    if (config.num_stop > 0 && config.stop == nullptr) throw ArgumentError("config: num_stop without stop");
    Request request;
    request.config.tau = config.tau;
    request.config.metric = static_cast<mars::Metric>(config.metric);
    request.config.max_new_tokens = config.max_new_tokens;
    if (config.window != 0) request.config.window = config.window;
    if (config.eos_ids != nullptr) request.config.eos_ids.emplace(config.eos_ids, config.eos_ids + config.num_eos_ids);
    for (std::size_t i = 0; i < config.num_stop; ++i) request.config.stop.emplace_back(&needed(config.stop[i], "config: a stop string"));
    request.config.temperature = config.temperature;
    request.config.top_k = config.top_k;
    request.config.top_p = config.top_p;
    request.config.seed = config.seed;
    request.config.repetition_penalty = config.repetition_penalty;
    request.commit = {static_cast<mars::Commit::Kind>(config.commit), config.cache_block};
    return request;
}

std::vector<mars::Message> messages_of(const char* text) {
    const auto value = nlohmann::json::parse(text, nullptr, false);
    std::vector<mars::Message> messages;
    for (const auto& each : value.is_array() ? value : nlohmann::json::array()) {
        const bool good = each.is_object() && each.contains("role") && each.contains("content") && each["role"].is_string() &&
                          each["content"].is_string();
        if (!good) throw mars::SessionError("messages must be a JSON list of {role, content}; wrong: " + std::to_string(messages.size()));
        messages.push_back({each["role"], each["content"]});
    }
    if (messages.empty()) throw mars::SessionError("messages must be a JSON list of {role, content}, and not empty");
    return messages;
}

mars::Prompt prompt_of(const mars_prompt* given) {
    const mars_prompt prompt = known(&needed(given, "prompt"), default_prompt, "prompt");
    if ((prompt.text != nullptr) + (prompt.messages != nullptr) + (prompt.token_ids != nullptr) != 1)
        throw ArgumentError("prompt: set exactly one of text, messages and token_ids");
    if (prompt.text != nullptr) return std::string(prompt.text, prompt.text_size > 0 ? prompt.text_size : std::strlen(prompt.text));
    if (prompt.messages != nullptr) return messages_of(prompt.messages);
    return std::vector<std::int64_t>(prompt.token_ids, prompt.token_ids + prompt.num_token_ids);
}

mars_finish_reason reason_of(std::optional<mars::FinishReason> reason) {
    if (!reason) return MARS_NOT_FINISHED;
    switch (*reason) {
    case mars::FinishReason::eos:
        return MARS_FINISH_EOS;
    case mars::FinishReason::stop:
        return MARS_FINISH_STOP;
    case mars::FinishReason::length:
        return MARS_FINISH_LENGTH;
    case mars::FinishReason::capacity:
        return MARS_FINISH_CAPACITY;
    case mars::FinishReason::cancelled:
        break;
    }
    return MARS_FINISH_CANCELLED;
}

mars_event view(const mars::Event& event) {
    return {sizeof(mars_event),     event.row,
            event.text.c_str(),     event.text.size(),
            event.token_ids.data(), event.confidences.data(),
            event.token_ids.size(), reason_of(event.finish_reason)};
}

void generate(const mars_session* session, std::vector<mars::Prompt> prompts, const std::vector<const mars_config*>& configs,
              mars_on_event on_event, void* user, mars_completion** completions) {
    std::vector<mars::GenerationConfig> settings;
    std::optional<mars::Commit> commit;
    for (const mars_config* each : configs) {
        Request request = request_of(each);
        if (commit && (commit->kind != request.commit.kind || commit->cache_block != request.commit.cache_block))
            throw ArgumentError("configs: all rows of a batch need the same commit and cache_block");
        commit = request.commit;
        settings.push_back(std::move(request.config));
    }
    mars::OnEvent forward;
    if (on_event != nullptr)
        forward = [&](const mars::Event& event) {
            const mars_event seen = view(event);
            return on_event(&seen, user) != 0;
        };
    std::vector<std::unique_ptr<mars_completion>> done;
    for (mars::Completion& each :
         needed(session, "session").session.generate_batch(prompts, settings, forward, commit.value_or(mars::Commit{})))
        done.push_back(std::make_unique<mars_completion>(std::move(each)));
    for (std::size_t i = 0; i < done.size(); ++i) completions[i] = done[i].release();
}

} // namespace

extern "C" {

uint32_t mars_abi_version(void) { return MARS_ABI_VERSION; }

const char* mars_version(void) { return MARS_VERSION; }

mars_status mars_error_status(const mars_error* error) { return error == nullptr ? MARS_OK : error->status; }

const char* mars_error_message(const mars_error* error) { return error == nullptr ? "" : error->message.c_str(); }

void mars_error_free(mars_error* error) { delete error; }

void mars_session_options_init(mars_session_options* options, size_t struct_size) { init(options, struct_size, default_options); }

mars_status mars_session_open(const char* path, const mars_session_options* options, mars_session** session, mars_error** error) {
    return guarded(error, [&] {
        needed(session, "session") = nullptr;
        const mars_session_options given = known(options, default_options, "options");
        mars::Session::Options wanted;
        if (given.device != nullptr) wanted.device = given.device;
        if (given.threads != 0) wanted.threads = given.threads;
        if (given.variant != nullptr) wanted.variant = given.variant;
        wanted.verify = given.verify != 0;
        *session = new mars_session{mars::Session::open(&needed(path, "path"), wanted)};
    });
}

void mars_session_close(mars_session* session) { delete session; }

mars_status mars_session_describe(const mars_session* session, mars_session_info* info, mars_error** error) {
    return guarded(error, [&] {
        const mars::Session& opened = needed(session, "session").session;
        const mars::Manifest& manifest = opened.bundle().manifest;
        const mars_session_info values{sizeof(values), manifest.model.vocab_size, opened.max_capacity(),
                                       manifest.block, manifest.tokens.mask,      manifest.text ? 1 : 0};
        fill(info, values, "info");
    });
}

void mars_config_init(mars_config* config, size_t struct_size) { init(config, struct_size, default_config()); }

void mars_prompt_init(mars_prompt* prompt, size_t struct_size) { init(prompt, struct_size, default_prompt); }

mars_status mars_encode(const mars_session* session, const mars_prompt* prompt, int64_t* ids, size_t capacity, size_t* num_ids,
                        mars_error** error) {
    return guarded(error, [&] {
        const std::vector<std::int64_t> found = needed(session, "session").session.encode(prompt_of(prompt));
        needed(num_ids, "num_ids") = found.size();
        if (capacity >= found.size()) std::copy(found.begin(), found.end(), &needed(ids, "ids"));
    });
}

mars_status mars_decode(const mars_session* session, const int64_t* ids, size_t num_ids, char* text, size_t capacity, size_t* text_size,
                        mars_error** error) {
    return guarded(error, [&] {
        if (num_ids > 0) needed(ids, "ids");
        const std::string found = needed(session, "session").session.decode({ids, ids + num_ids});
        needed(text_size, "text_size") = found.size();
        if (capacity > found.size()) std::memcpy(&needed(text, "text"), found.c_str(), found.size() + 1);
    });
}

const char* mars_completion_text(const mars_completion* completion, size_t* text_size) {
    if (text_size != nullptr) *text_size = completion->done.text.size();
    return completion->done.text.c_str();
}

const int64_t* mars_completion_token_ids(const mars_completion* completion, size_t* num_tokens) {
    if (num_tokens != nullptr) *num_tokens = completion->done.token_ids.size();
    return completion->done.token_ids.data();
}

const double* mars_completion_confidences(const mars_completion* completion, size_t* num_tokens) {
    if (num_tokens != nullptr) *num_tokens = completion->done.confidences.size();
    return completion->done.confidences.data();
}

mars_finish_reason mars_completion_finish_reason(const mars_completion* completion) { return reason_of(completion->done.finish_reason); }

mars_status mars_completion_stats(const mars_completion* completion, mars_stats* stats, mars_error** error) {
    return guarded(error, [&] {
        const mars::Stats& own = needed(completion, "completion").done.stats;
        const std::vector<std::int64_t>& accepted = completion->accepted;
        const mars_stats values{sizeof(values),
                                own.prompt_tokens,
                                own.tokens,
                                own.forwards,
                                own.prefill_forwards,
                                own.tokens_after_first,
                                own.prefill_time,
                                own.decode_time,
                                own.time_to_first_token,
                                own.tokens_per_forward(),
                                own.tokens_per_second(),
                                accepted.data(),
                                accepted.size()};
        fill(stats, values, "stats");
    });
}

void mars_completion_free(mars_completion* completion) { delete completion; }

mars_status mars_generate(const mars_session* session, const mars_prompt* prompt, const mars_config* config, mars_on_event on_event,
                          void* user, mars_completion** completion, mars_error** error) {
    return guarded(error, [&] {
        needed(completion, "completion") = nullptr;
        generate(session, {prompt_of(prompt)}, {config}, on_event, user, completion);
    });
}

mars_status mars_generate_batch(const mars_session* session, const mars_prompt* const* prompts, const mars_config* const* configs,
                                size_t num, mars_on_event on_event, void* user, mars_completion** completions, mars_error** error) {
    return guarded(error, [&] {
        std::vector<mars::Prompt> texts;
        std::vector<const mars_config*> settings;
        for (std::size_t i = 0; i < num; ++i) {
            (&needed(completions, "completions"))[i] = nullptr;
            texts.push_back(prompt_of((&needed(prompts, "prompts"))[i]));
            settings.push_back(configs == nullptr ? nullptr : configs[i]);
        }
        generate(session, std::move(texts), settings, on_event, user, completions);
    });
}

mars_status mars_stream_open(const mars_session* session, const mars_prompt* prompt, const mars_config* config, mars_stream** stream,
                             mars_error** error) {
    return guarded(error, [&] {
        needed(stream, "stream") = nullptr;
        const Request request = request_of(config);
        *stream = new mars_stream{needed(session, "session").session.stream(prompt_of(prompt), request.config, request.commit), {}};
    });
}

mars_status mars_stream_next(mars_stream* stream, mars_event* event, int32_t* done, mars_error** error) {
    return guarded(error, [&] {
        mars_stream& own = needed(stream, "stream");
        needed(event, "event");
        std::optional<mars::Event> next = own.stream.next();
        needed(done, "done") = next ? 0 : 1;
        own.event = next ? std::move(*next) : mars::Event{};
        fill(event, view(own.event), "event");
    });
}

double mars_stream_tau(const mars_stream* stream) { return stream->stream.tau(); }

mars_status mars_stream_set_tau(mars_stream* stream, double tau, mars_error** error) {
    return guarded(error, [&] { needed(stream, "stream").stream.set_tau(tau); });
}

void mars_stream_cancel(mars_stream* stream) { stream->stream.cancel(); }

mars_status mars_stream_completion(const mars_stream* stream, mars_completion** completion, mars_error** error) {
    return guarded(error, [&] {
        needed(completion, "completion") = nullptr;
        *completion = new mars_completion(needed(stream, "stream").stream.completion());
    });
}

void mars_stream_close(mars_stream* stream) { delete stream; }

} // extern "C"
