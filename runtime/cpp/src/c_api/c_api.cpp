// No Python file: the C interface except batchers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include <nlohmann/json.hpp>

#include <mars/conversation.hpp>
#include <mars/mars.h>
#include <mars/session.hpp>

#include "c_api/handles.hpp"

using namespace mars::c;

struct mars_stream {
    explicit mars_stream(mars::Stream opened) : own(std::move(opened)), stream(&*own) {}
    explicit mars_stream(mars::Stream* of_conversation) : stream(of_conversation) {}
    mars_stream(const mars_stream&) = delete;
    mars_stream& operator=(const mars_stream&) = delete;

    std::optional<mars::Stream> own; // no value if a conversation owns it
    mars::Stream* stream;
    mars::Event event; // the caller's current event
};

struct mars_conversation {
    mars::Conversation talk;
    std::optional<mars_stream> reply;
    std::string messages; // the caller's current messages
};

namespace {

/// Ask in a conversation, instead of the question of `turn` if there is one.
mars_status ask(mars_conversation* conversation, const char* text, const mars_config* config, std::optional<std::int64_t> turn,
                mars_stream** stream, mars_error** error) noexcept {
    return made(stream, "stream", error, [&] {
        mars_conversation& own = needed(conversation, "conversation");
        const Request request = request_of(config);
        if (request.cache_block != 1) throw ArgumentError("config: a conversation has no cache_block; leave it at 1");
        const std::string question = &needed(text, "text");
        return &own.reply.emplace(turn ? &own.talk.edit(question, request.config, *turn) : &own.talk.send(question, request.config));
    });
}

} // namespace

extern "C" {

uint32_t mars_abi_version(void) { return MARS_ABI_VERSION; }
const char* mars_version(void) { return MARS_VERSION; }

mars_status mars_error_status(const mars_error* error) { return error == nullptr ? MARS_OK : error->status; }
const char* mars_error_message(const mars_error* error) { return error == nullptr ? "" : error->message.c_str(); }
double mars_error_retry_after(const mars_error* error) { return error == nullptr ? 0.0 : error->retry_after; }
const char* mars_error_code(const mars_error* error) { return error == nullptr ? "" : error->code; }
const char* mars_error_field(const mars_error* error) { return error == nullptr ? "" : error->field; }
void mars_error_free(mars_error* error) {
    if (error != &out_of_memory) delete error;
}

mars_status mars_session_open(const char* path, const mars_session_options* options, mars_session** session, mars_error** error) {
    return made(session, "session", error,
                [&] { return new mars_session(mars::Session::open(&needed(path, "path"), options_of(options))); });
}

void mars_session_close(mars_session* session) { delete session; }

mars_status mars_session_describe(const mars_session* session, mars_session_info* info, mars_error** error) {
    return guarded(error, [&] {
        const mars_session& opened = needed(session, "session");
        const mars::SessionInfo& own = opened.info;
        mars_session_info values{};
        values.vocab_size = own.vocab_size;
        values.context_length = own.context_length;
        values.block = own.block;
        values.mask_id = own.mask_id;
        values.has_text = own.has_text ? 1 : 0;
        values.variant = own.variant.c_str();
        values.backend = own.backend.c_str();
        values.precision = own.precision.c_str();
        values.device = own.device.c_str();
        values.eos_ids = own.eos_ids.data();
        values.num_eos_ids = own.eos_ids.size();
        values.profiles = opened.profiles.data();
        values.num_profiles = opened.profiles.size();
        values.outputs = opened.outputs.data();
        values.num_outputs = opened.outputs.size();
        values.max_rows = own.max_rows.value_or(0);
        fill(info, values, "info");
    });
}

mars_status mars_session_warm_up(const mars_session* session, mars_error** error) {
    return guarded(error, [&] { needed(session, "session").session.warm_up(); });
}

mars_status mars_session_set_cost(const mars_session* session, const int64_t* positions, const double* seconds, size_t num,
                                  mars_error** error) {
    return guarded(error, [&] {
        std::vector<std::pair<std::int64_t, double>> points;
        for (std::size_t i = 0; i < num; ++i) points.emplace_back((&needed(positions, "positions"))[i], (&needed(seconds, "seconds"))[i]);
        needed(session, "session").session.set_cost(std::move(points));
    });
}

void mars_prefix_stats_init(mars_prefix_stats* stats, size_t struct_size) { init(stats, struct_size, mars_prefix_stats{}); }

mars_status mars_session_prefix_stats(const mars_session* session, mars_prefix_stats* stats, mars_error** error) {
    return guarded(error, [&] {
        const mars::PrefixStats now = needed(session, "session").session.prefix_stats();
        mars_prefix_stats values{};
        values.queries = now.queries;
        values.hits = now.hits;
        values.query_tokens = now.query_tokens;
        values.hit_tokens = now.hit_tokens;
        values.saved = now.saved;
        values.evicted = now.evicted;
        values.failed = now.failed;
        values.entries = now.entries;
        values.num_bytes = now.num_bytes;
        fill(stats, values, "stats");
    });
}

mars_status mars_session_forget_prefixes(const mars_session* session, mars_error** error) {
    return guarded(error, [&] { needed(session, "session").session.forget_prefixes(); });
}

mars_status mars_config_of_profile(const mars_session* session, const char* name, mars_config* config, mars_error** error) {
    return guarded(error, [&] {
        const mars_session& opened = needed(session, "session");
        const mars::GenerationConfig found = opened.session.config_of_profile(&needed(name, "name"));
        mars_config values = known(&needed(config, "config"), default_config(), "config");
        values.tau = found.is_exact() ? MARS_EXACT : found.bound();
        values.metric = static_cast<int32_t>(found.metric);
        values.masks = found.masks;
        values.masks_of_tau = 1;
        fill(config, values, "config");
    });
}

mars_status mars_encode(const mars_session* session, const mars_prompt* prompt, int64_t* ids, size_t capacity, size_t* num_ids,
                        mars_error** error) {
    return guarded(error, [&] {
        const std::vector<std::int64_t> token_ids = needed(session, "session").session.encode(prompt_of(prompt));
        needed(num_ids, "num_ids") = token_ids.size();
        if (capacity >= token_ids.size()) std::copy(token_ids.begin(), token_ids.end(), &needed(ids, "ids"));
    });
}

mars_status mars_decode(const mars_session* session, const int64_t* ids, size_t num_ids, char* text, size_t capacity, size_t* text_size,
                        mars_error** error) {
    return guarded(error, [&] {
        if (num_ids > 0) needed(ids, "ids");
        const std::string content = needed(session, "session").session.decode({ids, ids + num_ids});
        needed(text_size, "text_size") = content.size();
        if (capacity > content.size()) std::memcpy(&needed(text, "text"), content.c_str(), content.size() + 1);
    });
}

const char* mars_completion_text(const mars_completion* completion, size_t* text_size) {
    if (text_size != nullptr) *text_size = completion == nullptr ? 0 : completion->done.text.size();
    return completion == nullptr ? "" : completion->done.text.c_str();
}

const int64_t* mars_completion_token_ids(const mars_completion* completion, size_t* num_tokens) {
    if (num_tokens != nullptr) *num_tokens = completion == nullptr ? 0 : completion->done.token_ids.size();
    return completion == nullptr ? nullptr : completion->done.token_ids.data();
}

const double* mars_completion_confidences(const mars_completion* completion, size_t* num_tokens) {
    if (num_tokens != nullptr) *num_tokens = completion == nullptr ? 0 : completion->done.confidences.size();
    return completion == nullptr ? nullptr : completion->done.confidences.data();
}

mars_finish_reason mars_completion_finish_reason(const mars_completion* completion) {
    return completion == nullptr ? MARS_NOT_FINISHED : reason_of(completion->done.finish_reason);
}

void mars_event_init(mars_event* event, size_t struct_size) { init(event, struct_size, mars_event{}); }
void mars_stats_init(mars_stats* stats, size_t struct_size) { init(stats, struct_size, mars_stats{}); }
void mars_session_info_init(mars_session_info* info, size_t struct_size) { init(info, struct_size, mars_session_info{}); }

mars_status mars_completion_stats(const mars_completion* completion, mars_stats* stats, mars_error** error) {
    return guarded(error, [&] {
        const mars::Stats& own = needed(completion, "completion").done.stats;
        const std::vector<std::int64_t>& accepted = completion->accepted;
        mars_stats values{};
        values.prompt_tokens = own.prompt_tokens;
        values.tokens = own.tokens;
        values.forwards = own.forwards;
        values.prefill_forwards = own.prefill_forwards;
        values.tokens_after_first = own.tokens_after_first;
        values.prefill_time = own.prefill_time;
        values.decode_time = own.decode_time;
        values.time_to_first_token = own.time_to_first_token;
        values.tokens_per_forward = own.tokens_per_forward();
        values.tokens_per_second = own.tokens_per_second();
        values.accepted = accepted.data();
        values.num_accepted = accepted.size();
        values.draft_tokens = own.draft_tokens;
        values.accepted_draft_tokens = own.accepted_draft_tokens;
        values.rejected_draft_tokens = own.rejected_draft_tokens();
        values.queue_time = own.queue_time;
        values.cached_tokens = own.cached_tokens;
        values.forced = own.forced;
        fill(stats, values, "stats");
    });
}

void mars_completion_free(mars_completion* completion) { delete completion; }

mars_status mars_generate(const mars_session* session, const mars_prompt* prompt, const mars_config* config, mars_on_event on_event,
                          void* user, mars_completion** completion, mars_error** error) {
    return mars_generate_batch(session, &prompt, &config, 1, on_event, user, completion, error);
}

mars_status mars_generate_batch(const mars_session* session, const mars_prompt* const* prompts, const mars_config* const* configs,
                                size_t num, mars_on_event on_event, void* user, mars_completion** completions, mars_error** error) {
    return guarded(error, [&] {
        if (num > 0) std::fill_n(&needed(completions, "completions"), num, nullptr);
        std::vector<mars::Prompt> texts;
        std::vector<mars::GenerationConfig> settings;
        std::optional<std::int64_t> cache_block;
        for (std::size_t i = 0; i < num; ++i) {
            texts.push_back(prompt_of((&needed(prompts, "prompts"))[i]));
            Request request = request_of(configs == nullptr ? nullptr : configs[i]);
            if (cache_block && *cache_block != request.cache_block)
                throw ArgumentError("configs: all rows of a batch need the same cache_block");
            cache_block = request.cache_block;
            settings.push_back(std::move(request.config));
        }
        const mars::Session& opened = needed(session, "session").session;
        std::vector<std::unique_ptr<mars_completion>> done;
        for (mars::Completion& each : opened.generate_batch(texts, settings, callback_of(on_event, user), cache_block.value_or(1)))
            done.push_back(std::make_unique<mars_completion>(std::move(each)));
        for (std::size_t i = 0; i < done.size(); ++i) completions[i] = done[i].release();
    });
}

mars_status mars_stream_open(const mars_session* session, const mars_prompt* prompt, const mars_config* config, mars_stream** stream,
                             mars_error** error) {
    return made(stream, "stream", error, [&] {
        const Request request = request_of(config);
        return new mars_stream(needed(session, "session").session.stream(prompt_of(prompt), request.config, request.cache_block));
    });
}

mars_status mars_stream_next(mars_stream* stream, mars_event* event, int32_t* done, mars_error** error) {
    return guarded(error, [&] {
        mars_stream& own = needed(stream, "stream");
        next_event(*own.stream, own.event, event, done);
    });
}

double mars_stream_tau(const mars_stream* stream) { return stream == nullptr ? std::nan("") : stream->stream->tau().value_or(MARS_EXACT); }

mars_status mars_stream_set_tau(mars_stream* stream, double tau, mars_error** error) {
    return guarded(error, [&] { set_tau(*needed(stream, "stream").stream, tau); });
}

void mars_stream_cancel(mars_stream* stream) {
    if (stream != nullptr) stream->stream->cancel();
}

mars_status mars_stream_completion(const mars_stream* stream, mars_completion** completion, mars_error** error) {
    return made(completion, "completion", error, [&] { return new mars_completion(needed(stream, "stream").stream->completion()); });
}

void mars_stream_close(mars_stream* stream) {
    if (stream == nullptr || !stream->own) return;
    guarded(nullptr, [&] { stream->own->close(); }); // keeps its entries in the prefix cache
    delete stream;
}

mars_status mars_conversation_open(const mars_session* session, const char* system, int32_t drop_oldest, mars_conversation** conversation,
                                   mars_error** error) {
    return made(conversation, "conversation", error, [&] {
        const std::optional<std::string> opening = system != nullptr ? std::optional<std::string>(system) : std::nullopt;
        return new mars_conversation{needed(session, "session").session.conversation(opening, drop_oldest != 0), {}, {}};
    });
}

mars_status mars_conversation_send(mars_conversation* conversation, const char* text, const mars_config* config, mars_stream** stream,
                                   mars_error** error) {
    return ask(conversation, text, config, std::nullopt, stream, error);
}

mars_status mars_conversation_edit(mars_conversation* conversation, const char* text, const mars_config* config, int64_t turn,
                                   mars_stream** stream, mars_error** error) {
    return ask(conversation, text, config, turn, stream, error);
}

mars_status mars_conversation_undo(mars_conversation* conversation, int64_t turns, mars_error** error) {
    return guarded(error, [&] { needed(conversation, "conversation").talk.undo(turns); });
}

mars_status mars_conversation_reset(mars_conversation* conversation, mars_error** error) {
    return guarded(error, [&] { needed(conversation, "conversation").talk.reset(); });
}

mars_status mars_conversation_resume(mars_conversation* conversation, const char* messages, mars_error** error) {
    return guarded(error, [&] { needed(conversation, "conversation").talk.resume(messages_of(&needed(messages, "messages"))); });
}

mars_status mars_conversation_messages(mars_conversation* conversation, const char** messages, mars_error** error) {
    return guarded(error, [&] {
        mars_conversation& own = needed(conversation, "conversation");
        nlohmann::ordered_json said = nlohmann::ordered_json::array();
        for (const mars::Message& each : own.talk.messages()) said.push_back({{"role", each.role}, {"content", each.content}});
        own.messages = said.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
        needed(messages, "messages") = own.messages.c_str();
    });
}

int64_t mars_conversation_dropped(const mars_conversation* conversation) {
    return conversation == nullptr ? 0 : conversation->talk.dropped();
}

void mars_conversation_close(mars_conversation* conversation) { delete conversation; }

} // extern "C"
