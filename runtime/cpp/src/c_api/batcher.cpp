// No Python file: the C interface of batchers and requests.
#include <cmath>

#include <mars/batcher.hpp>

#include "c_api/handles.hpp"
#include "session/answers.hpp"

using namespace mars::c;

struct mars_batcher {
    mars::Batcher batcher;
};

struct mars_request {
    mars::Request request;
    mars::Event event = {}; // the caller's current event
};

namespace {

mars_limits default_limits() {
    const mars::Limits own;
    mars_limits values{}; // 0 is MARS_NO_LIMIT
    values.struct_size = sizeof values;
    values.max_waiting = own.max_waiting;
    values.prefill_tokens = own.prefill_tokens;
    values.client_share = own.client_share;
    values.cache_block = own.cache_block;
    return values;
}

const mars_entry default_entry{sizeof(mars_entry), 0.0, nullptr, nullptr, nullptr};

std::optional<double> seconds_of(double seconds, const char* name) {
    if (seconds == MARS_FOREVER) return std::nullopt;
    if (!(seconds >= 0)) throw ArgumentError(std::string(name) + " must be seconds of 0 or more, or MARS_FOREVER");
    return seconds;
}

std::optional<std::int64_t> limit_of(std::int64_t value) { return value == MARS_NO_LIMIT ? std::nullopt : std::optional(value); }

mars::Limits limits_of(const mars_limits* given) {
    const mars_limits values = known(given, default_limits(), "limits");
    mars::Limits limits;
    limits.max_rows = limit_of(values.max_rows);
    limits.max_waiting = values.max_waiting;
    limits.prefill_tokens = values.prefill_tokens;
    limits.max_prompt_tokens = limit_of(values.max_prompt_tokens);
    limits.max_new_tokens = limit_of(values.max_new_tokens);
    limits.max_stops = limit_of(values.max_stops);
    limits.kv_bytes = limit_of(values.kv_bytes);
    limits.client_share = values.client_share;
    limits.max_rows_per_client = limit_of(values.max_rows_per_client);
    limits.cache_block = values.cache_block;
    return limits;
}

} // namespace

extern "C" {

void mars_limits_init(mars_limits* limits, size_t struct_size) { init(limits, struct_size, default_limits()); }
void mars_entry_init(mars_entry* entry, size_t struct_size) { init(entry, struct_size, default_entry); }
void mars_batcher_state_init(mars_batcher_state* state, size_t struct_size) { init(state, struct_size, mars_batcher_state{}); }

mars_status mars_batcher_open(const mars_session* session, const mars_limits* limits, mars_batcher** batcher, mars_error** error) {
    return made(batcher, "batcher", error,
                [&] { return new mars_batcher{mars::Batcher(needed(session, "session").session, limits_of(limits))}; });
}

mars_status mars_batcher_submit(mars_batcher* batcher, const mars_prompt* prompt, const mars_config* config, const mars_entry* entry,
                                mars_request** request, mars_error** error) {
    return made(request, "request", error, [&] {
        const mars_entry how = known(entry, default_entry, "entry");
        const mars::c::Request asked = request_of(config);
        if (asked.cache_block != 1) throw ArgumentError("config: a batcher has its cache_block in mars_limits; leave it at 1");
        mars::Batcher::Entry way{seconds_of(how.wait, "entry: wait"), std::nullopt, callback_of(how.on_event, how.user)};
        if (how.client != nullptr) way.client = how.client;
        return new mars_request{needed(batcher, "batcher").batcher.submit(prompt_of(prompt), asked.config, way)};
    });
}

mars_status mars_request_next(mars_request* request, mars_event* event, int32_t* done, mars_error** error) {
    return guarded(error, [&] {
        mars_request& own = needed(request, "request");
        next_event(own.request, own.event, event, done);
    });
}

mars_status mars_request_result(mars_request* request, double timeout, mars_completion** completion, mars_error** error) {
    return made(completion, "completion", error,
                [&] { return new mars_completion(needed(request, "request").request.result(seconds_of(timeout, "timeout"))); });
}

mars_status mars_request_completion(const mars_request* request, mars_completion** completion, mars_error** error) {
    return made(completion, "completion", error, [&] { return new mars_completion(needed(request, "request").request.completion()); });
}

mars_finish_reason mars_request_finish_reason(const mars_request* request) {
    return request == nullptr ? MARS_NOT_FINISHED : reason_of(request->request.finish_reason());
}

double mars_request_tau(const mars_request* request) {
    return request == nullptr ? std::nan("") : request->request.tau().value_or(MARS_EXACT);
}

mars_status mars_request_set_tau(mars_request* request, double tau, mars_error** error) {
    return guarded(error, [&] { set_tau(needed(request, "request").request, tau); });
}

void mars_request_cancel(mars_request* request) {
    if (request != nullptr) guarded(nullptr, [&] { request->request.cancel(); });
}
void mars_request_free(mars_request* request) { delete request; }

mars_status mars_batcher_describe(const mars_batcher* batcher, mars_batcher_state* state, mars_error** error) {
    return guarded(error, [&] {
        const mars::Batcher& own = needed(batcher, "batcher").batcher;
        const mars::Counts now = own.counts();
        mars_batcher_state values{};
        values.accepted = now.accepted;
        values.finished = now.finished;
        values.failed = now.failed;
        values.cancelled = now.cancelled;
        values.expired = now.expired;
        values.refused = now.refused;
        values.overloaded = now.overloaded;
        values.prompt_tokens = now.prompt_tokens;
        values.tokens = now.tokens;
        values.num_running = own.num_running();
        values.num_waiting = own.num_waiting();
        values.kv_usage = own.kv_usage();
        values.step_seconds = own.step_seconds();
        values.alive = own.alive() ? 1 : 0;
        fill(state, values, "state");
    });
}

mars_status mars_batcher_close(mars_batcher* batcher, double drain, double timeout, int32_t* ended, mars_error** error) {
    return guarded(error, [&] {
        const std::optional<double> first = seconds_of(drain, "drain"), last = seconds_of(timeout, "timeout");
        const bool has_ended = needed(batcher, "batcher").batcher.close(first.value_or(mars::forever), last);
        if (ended != nullptr) *ended = has_ended ? 1 : 0;
    });
}

void mars_batcher_free(mars_batcher* batcher) { delete batcher; }

} // extern "C"
