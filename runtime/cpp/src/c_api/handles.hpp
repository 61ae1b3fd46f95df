// No Python file: the handles of the C interface, structs whose size may differ, exceptions as errors.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <mars/errors.hpp>
#include <mars/mars.h>
#include <mars/session.hpp>

#include "text/utf8.hpp"

struct mars_error {
    mars_status status;
    std::string message;
    const char* code;
    const char* field = "";
    double retry_after = 0.0;
};

struct mars_session {
    explicit mars_session(mars::Session opened) : session(std::move(opened)) {
        for (const std::string& each : info.profiles) profiles.push_back(each.c_str());
        for (const std::string& each : info.outputs) outputs.push_back(each.c_str());
    }
    mars_session(const mars_session&) = delete; // the lists below point into it
    mars_session& operator=(const mars_session&) = delete;

    mars::Session session;
    const mars::SessionInfo info = session.info();
    std::vector<const char*> profiles, outputs;
};

struct mars_completion {
    explicit mars_completion(mars::Completion completion) : done(std::move(completion)) {
        if (!done.stats.accepted.empty()) accepted.resize(static_cast<std::size_t>(done.stats.accepted.rbegin()->first) + 1);
        for (const auto& [tokens, steps] : done.stats.accepted) accepted[static_cast<std::size_t>(tokens)] = steps;
    }

    mars::Completion done;
    std::vector<std::int64_t> accepted; // the stats' counts by index
};

namespace mars::c {

/// The C interface was used wrongly.
struct ArgumentError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <typename T>
T& needed(T* pointer, const char* name) {
    if (pointer == nullptr) throw ArgumentError(std::string(name) + " must not be NULL");
    return *pointer;
}

/// The size of the caller's struct.
template <typename T>
std::size_t size_of(const T* given, const char* name) {
    const std::size_t size = needed(given, name).struct_size;
    if (size < sizeof(std::size_t)) throw ArgumentError(std::string(name) + ": set struct_size to the size of the struct");
    return size;
}

/// Write `defaults` to the caller's struct as far as both reach; fields that this library does not know become 0.
template <typename T>
void init(T* target, std::size_t struct_size, const T& defaults) noexcept {
    if (target == nullptr || struct_size < sizeof(std::size_t)) return;
    std::memset(target, 0, struct_size);
    std::memcpy(target, &defaults, std::min(struct_size, sizeof(T)));
    target->struct_size = struct_size;
}

/// Write `values` to the caller's struct as far as both reach.
template <typename T>
void fill(T* target, const T& values, const char* name) {
    init(target, size_of(target, name), values);
}

/// The caller's struct as this library knows it. Fields missing in an older caller's get their defaults; fields that
/// only a newer caller knows must be zero.
template <typename T>
T known(const T* given, const T& defaults, const char* name) {
    if (given == nullptr) return defaults;
    const std::size_t size = size_of(given, name);
    const auto* bytes = reinterpret_cast<const unsigned char*>(given);
    for (std::size_t i = sizeof(T); i < size; ++i)
        if (bytes[i] != 0)
            throw ArgumentError(std::string(name) + ": a setting that libmars " + mars_version() + " does not know; update libmars");
    T values = defaults;
    std::memcpy(&values, given, std::min(size, sizeof(T)));
    return values;
}

inline mars_error out_of_memory{MARS_ERROR_MEMORY, "out of memory", "out_of_memory"}; // instead of one that cannot be allocated

inline mars_status fail(mars_error** error, mars_status status, const char* message, const char* code, const char* field = "",
                        double retry_after = 0.0) noexcept {
    if (error == nullptr) return status;
    try {
        *error = new mars_error{status, mars::utf8::lossy(message), code, field, retry_after}; // it may quote a damaged file
    } catch (const std::bad_alloc&) {
        *error = &out_of_memory;
    }
    return (*error)->status;
}

inline mars_status fail(mars_error** error, mars_status status, const mars::Error& problem, double retry_after = 0.0) noexcept {
    return fail(error, status, problem.what(), problem.code, problem.field, retry_after);
}

/// Run `body`; an exception becomes a status and a message.
template <typename Body>
mars_status guarded(mars_error** error, const Body& body) noexcept {
    if (error != nullptr) *error = nullptr;
    try {
        body();
        return MARS_OK;
    } catch (const mars::BundleError& problem) {
        return fail(error, MARS_ERROR_BUNDLE, problem);
    } catch (const mars::Overloaded& problem) {
        return fail(error, MARS_ERROR_OVERLOADED, problem, problem.retry_after);
    } catch (const mars::DeviceLost& problem) {
        return fail(error, MARS_ERROR_DEVICE_LOST, problem);
    } catch (const mars::DeviceError& problem) {
        return fail(error, MARS_ERROR_DEVICE, problem);
    } catch (const mars::MemoryError& problem) {
        return fail(error, MARS_ERROR_MEMORY, problem);
    } catch (const mars::Error& problem) {
        return fail(error, MARS_ERROR_SESSION, problem);
    } catch (const ArgumentError& problem) {
        return fail(error, MARS_ERROR_ARGUMENT, problem.what(), "invalid_value");
    } catch (const std::bad_alloc&) {
        return fail(error, MARS_ERROR_MEMORY, "out of memory", "out_of_memory");
    } catch (const std::exception& problem) {
        return fail(error, MARS_ERROR_INTERNAL, problem.what(), "failed");
    } catch (...) {
        return fail(error, MARS_ERROR_INTERNAL, "an exception that is not a std::exception, perhaps from the callback", "failed");
    }
}

/// Store what `make` returns in `*target`, NULL if it throws.
template <typename Handle, typename Make>
mars_status made(Handle** target, const char* name, mars_error** error, const Make& make) noexcept {
    return guarded(error, [&] {
        needed(target, name) = nullptr;
        *target = make();
    });
}

static_assert(MARS_FINISH_EOS == static_cast<int>(FinishReason::eos) + 1 &&
              MARS_FINISH_DEADLINE == static_cast<int>(FinishReason::deadline) + 1);

inline mars_finish_reason reason_of(std::optional<FinishReason> reason) {
    return reason ? static_cast<mars_finish_reason>(static_cast<int>(*reason) + 1) : MARS_NOT_FINISHED;
}

inline mars_event view(const mars::Event& event) {
    return {sizeof(mars_event),     event.row,
            event.text.c_str(),     event.text.size(),
            event.token_ids.data(), event.confidences.data(),
            event.token_ids.size(), reason_of(event.finish_reason)};
}

/// Take the next event of a stream or request into `held`, and show it in the caller's `event`. With wrong arguments no
/// event is taken.
template <typename Source>
void next_event(Source& source, Event& held, mars_event* event, std::int32_t* done) {
    size_of(event, "event");
    needed(done, "done");
    std::optional<Event> next = source.next();
    *done = next ? 0 : 1;
    held = next ? std::move(*next) : Event{};
    fill(event, view(held), "event");
}

template <typename Source>
void set_tau(Source& source, double tau) {
    if (tau == MARS_EXACT)
        source.set_exact(true);
    else
        source.set_tau(tau);
}

/// Settings of a request. The functions below throw ArgumentError; NULL is the default.
struct Request {
    GenerationConfig config;
    std::int64_t cache_block = 1;
};
mars_config default_config();
Session::Options options_of(const mars_session_options* given);
Request request_of(const mars_config* given);

/// Chat messages from JSON. Throws SessionError for anything else.
std::vector<Message> messages_of(const char* text);

/// Throws ArgumentError, and SessionError for invalid messages.
Prompt prompt_of(const mars_prompt* given);

/// The caller's callback as one of the C++ interface; null for NULL.
inline OnEvent callback_of(mars_on_event on_event, void* user) {
    if (on_event == nullptr) return nullptr;
    return [on_event, user](const Event& event) {
        const mars_event seen = view(event);
        return on_event(&seen, user) != 0;
    };
}

} // namespace mars::c
