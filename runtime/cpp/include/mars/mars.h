/* The C interface of libmars. docs/cpp.md is its guide.
 *
 * Rules for all functions:
 * - Every struct begins with struct_size: set it to sizeof the struct, as the *_init functions do. Structs only grow at the end.
 *   Fields that an older caller does not know keep their defaults. Fields of a newer caller that this library does not know must
 *   be 0; the library sets them to 0 in structs that it fills.
 * - A function that can fail returns a mars_status and, if `error` is not NULL, stores a mars_error there; free it.
 * - Strings are UTF-8. Returned strings and arrays belong to the handle of the call and are valid until the next call on it or its
 *   end. Arguments are copied before a call returns.
 * - No exception leaves the library, and it prints nothing.
 * - Threads: a session serves any number of threads. A stream and a completion belong to one thread at a time, except for
 *   mars_stream_tau, mars_stream_set_tau and mars_stream_cancel, which any thread may call while another is in mars_stream_next.
 *   A batcher and its requests serve any number of threads; an event of mars_request_next is valid until the next one.
 */
#ifndef MARS_H
#define MARS_H

#include <stddef.h>
#include <stdint.h>

#ifndef MARS_API
#define MARS_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Incremented when programs built against an older header would no longer work. */
#define MARS_ABI_VERSION 1

/* MARS_ABI_VERSION of the running library, and its version such as "0.1.0". */
MARS_API uint32_t mars_abi_version(void);
MARS_API const char* mars_version(void);

/* ---- errors ---- */

typedef enum mars_status {
    MARS_OK = 0,
    MARS_ERROR_BUNDLE = 1,     /* the bundle is damaged, unsafe, or of a format this library does not read */
    MARS_ERROR_SESSION = 2,    /* the bundle is fine but cannot run here, or the request cannot be served as it stands */
    MARS_ERROR_ARGUMENT = 3,   /* this interface was used wrongly: a NULL, a wrong struct_size, an unknown constant */
    MARS_ERROR_MEMORY = 4,     /* not enough memory for it now */
    MARS_ERROR_INTERNAL = 5,   /* a bug of this library, or an exception of the caller's callback */
    MARS_ERROR_DEVICE = 6,     /* a step failed on the device; the request was valid */
    MARS_ERROR_OVERLOADED = 7, /* a batcher has no room for it now; see mars_error_retry_after */
    MARS_ERROR_DEVICE_LOST = 8 /* the device has failed for good: restart the process */
} mars_status;

typedef struct mars_error mars_error;

/* MARS_OK for NULL. */
MARS_API mars_status mars_error_status(const mars_error* error);
/* What is wrong, where, and what to do; may have several lines. */
MARS_API const char* mars_error_message(const mars_error* error);
/* For programs: a code such as "context_length_exceeded" (docs/serving.md lists them), and the setting at fault or "prompt". "" if there is
 * none. */
MARS_API const char* mars_error_code(const mars_error* error);
MARS_API const char* mars_error_field(const mars_error* error);
/* Estimated seconds until there is room; 0 unless the status is MARS_ERROR_OVERLOADED. */
MARS_API double mars_error_retry_after(const mars_error* error);
/* Free an error. Like all functions that free, it accepts NULL. */
MARS_API void mars_error_free(mars_error* error);

/* ---- sessions ---- */

typedef struct mars_session mars_session;

#define MARS_CACHE_AUTO (-1)

/* When files are hashed: unless an earlier start verified them, always, or never (sizes are checked in any case). */
typedef enum mars_verify { MARS_VERIFY_ONCE = 0, MARS_VERIFY_ALWAYS = 1, MARS_VERIFY_NEVER = 2 } mars_verify;

typedef enum mars_log_level { MARS_LOG_DEBUG = 0, MARS_LOG_INFO = 1, MARS_LOG_WARNING = 2, MARS_LOG_ERROR = 3 } mars_log_level;
/* Receives one line of a session's log, from any thread, until the session and its streams are closed. The line is
 * valid during the call. */
typedef void (*mars_on_log)(int32_t level, const char* line, void* user);

typedef struct mars_session_options {
    size_t struct_size;
    const char* device;  /* an execution provider: "cpu", "cuda", "cuda:1", ...; NULL: "cpu". A missing one is an error */
    int32_t threads;     /* compute threads; 0: the backend's choice */
    int32_t verify;      /* a mars_verify: when files are hashed */
    const char* variant; /* NULL: the first that runs here */
    int64_t cache_bytes; /* memory of the prefix cache; 0: none; MARS_CACHE_AUTO (default): a small share of free memory */
    int32_t safe;        /* nonzero: do not trust the bundle; hash everything, run no engine, limit sizes (docs/security.md) */
    int32_t
        parse_special; /* nonzero: the text of a special token inside a message, such as <|im_end|>, becomes that token; default: plain text */
    const char* const* option_names; /* options of ONNX Runtime by its own names: with a dot for the session, without for the provider */
    const char* const* option_values;
    size_t num_options;
    mars_on_log on_log; /* NULL: nothing is logged */
    void* log_user;
    void* cuda_stream;      /* a cudaStream_t for CUDA steps; it must outlive the session, nothing else may use it during a step */
    int64_t prefill_tokens; /* prompt tokens of one step, at most; 256 */
} mars_session_options;

typedef struct mars_session_info {
    size_t struct_size;
    int64_t vocab_size, context_length, block, mask_id; /* mask_id: -1 for a model without a mask token */
    int32_t has_text;                                   /* whether prompts may be text; otherwise only token ids */
    int32_t reserved;                                   /* 0 */
    const char *variant, *backend, *precision;          /* of the running graph or engine */
    const char* device;                                 /* such as "cpu", "cuda" or "cuda:1" */
    const int64_t* eos_ids;
    size_t num_eos_ids;
    const char* const* profiles; /* profiles that are valid for the running variant */
    size_t num_profiles;
    const char* const* outputs; /* the graph's outputs, such as "logits" */
    size_t num_outputs;
    int64_t max_rows; /* most sequences in one forward, if an engine limits them; 0: no limit */
} mars_session_info;

/* Set the defaults, in this function and in all others with this ending; `struct_size` is sizeof the struct. */
MARS_API void mars_session_options_init(mars_session_options* options, size_t struct_size);
MARS_API void mars_session_info_init(mars_session_info* info, size_t struct_size);

/* Open the bundle directory `path`. `options` may be NULL. MARS_ERROR_BUNDLE for a bad bundle, MARS_ERROR_SESSION if no
 * variant of it runs here. */
MARS_API mars_status mars_session_open(const char* path, const mars_session_options* options, mars_session** session, mars_error** error);
/* Free a session. Its streams stay usable; the bundle is closed with the last of them. */
MARS_API void mars_session_close(mars_session* session);
/* Properties of the running variant and its model. Texts and arrays belong to the session. */
MARS_API mars_status mars_session_describe(const mars_session* session, mars_session_info* info, mars_error** error);

/* Run one step, so that no request waits for what the first one allocates. */
MARS_API mars_status mars_session_warm_up(const mars_session* session, mars_error** error);
/* Set the cost of steps instead of learning it: `num` numbers of positions (rows x slots), rising, and the seconds of
 * such a step, all above 0. */
MARS_API mars_status mars_session_set_cost(const mars_session* session, const int64_t* positions, const double* seconds, size_t num,
                                           mars_error** error);

/* Statistics of a session's prefix cache (docs/conversations.md). */
typedef struct mars_prefix_stats {
    size_t struct_size;
    int64_t queries, hits;            /* prompts looked up, and prompts with a cached beginning */
    int64_t query_tokens, hit_tokens; /* tokens of all these prompts, and the cached ones */
    int64_t saved, evicted, failed;   /* entries added, entries removed to make room, and entries that could not be copied */
    int64_t entries, num_bytes;       /* current contents */
} mars_prefix_stats;

MARS_API void mars_prefix_stats_init(mars_prefix_stats* stats, size_t struct_size);
/* Counts since the session was opened. */
MARS_API mars_status mars_session_prefix_stats(const mars_session* session, mars_prefix_stats* stats, mars_error** error);
/* Clear the prefix cache. */
MARS_API mars_status mars_session_forget_prefixes(const mars_session* session, mars_error** error);

/* ---- requests ---- */

typedef enum mars_metric { MARS_PROBABILITY = 0, MARS_MARGIN = 1, MARS_ENTROPY = 2 } mars_metric;

#define MARS_MASKS_AUTO (-1) /* chosen at each step for the highest speed */
#define MARS_MASKS_FULL (-2) /* as many as the block allows */
#define MARS_EXACT (-1.0)    /* instead of a tau: several tokens a step, and the text of one token at a time */

/* Settings of one request. */
typedef struct mars_config {
    size_t struct_size;
    double tau;          /* MARS_EXACT (default), or a confidence bound that trades quality for speed; 1 (entropy: 0) is one token a step */
    int32_t metric;      /* a mars_metric: what tau is compared with */
    int64_t cache_block; /* of generate and stream, for all rows: as in mars_limits; default: 1 */
    int64_t max_new_tokens; /* default: 256 */
    int64_t masks;          /* most mask slots of a step: a number of 0 or more, MARS_MASKS_AUTO (default) or MARS_MASKS_FULL */
    const int64_t* eos_ids; /* NULL: the model's own. Not NULL with num_eos_ids 0: none */
    size_t num_eos_ids;
    const char* const* stop; /* strings that end the text and are not part of it */
    size_t num_stop;
    double temperature;        /* 0 is greedy; otherwise the drawn token's own probability is compared with tau */
    int64_t top_k;             /* 0 is off */
    double top_p;              /* 1 is off */
    uint64_t seed;             /* draws depend only on it and the position */
    double repetition_penalty; /* 1 is off */
    int64_t prompt_lookup;     /* exact only: propose what followed the last `prompt_lookup` tokens before; 0 is off */
    double min_p;              /* keep tokens at least this likely relative to the likeliest; 0 is off */
    const char* cache_salt;    /* only requests with the same salt share KV entries; NULL: "" */
    double deadline;           /* seconds after which the answer ends; 0: none */
    const char* grammar;       /* name of a grammar of the bundle that the answer follows; NULL: none */
    int32_t masks_of_tau;      /* not 0: masks came with the tau, as of a profile; exact mode sets them to auto */
} mars_config;

MARS_API void mars_config_init(mars_config* config, size_t struct_size);
/* Set tau, metric and masks from a calibrated profile. A stale profile is an error that says how to renew it. */
MARS_API mars_status mars_config_of_profile(const mars_session* session, const char* name, mars_config* config, mars_error** error);

/* A prompt: exactly one of text, messages and token_ids is not NULL. */
typedef struct mars_prompt {
    size_t struct_size;
    const char* text;     /* continued as it is */
    size_t text_size;     /* in bytes; SIZE_MAX (default): up to the first zero byte */
    const char* messages; /* JSON: [{"role": "user", "content": "..."}, ...], rendered by the chat template */
    const int64_t* token_ids;
    size_t num_token_ids;
} mars_prompt;

MARS_API void mars_prompt_init(mars_prompt* prompt, size_t struct_size);

/* Write the number of a prompt's token ids to *num_ids, and the ids to `ids` if `capacity` is large enough. `ids`
 * may be NULL with capacity 0. */
MARS_API mars_status mars_encode(const mars_session* session, const mars_prompt* prompt, int64_t* ids, size_t capacity, size_t* num_ids,
                                 mars_error** error);
/* Write the number of bytes of the ids' text to *text_size, and the text with a zero byte to `text` if `capacity` is
 * greater. */
MARS_API mars_status mars_decode(const mars_session* session, const int64_t* ids, size_t num_ids, char* text, size_t capacity,
                                 size_t* text_size, mars_error** error);

/* ---- answers ---- */

typedef enum mars_finish_reason {
    MARS_NOT_FINISHED = 0,
    MARS_FINISH_EOS = 1,
    MARS_FINISH_STOP = 2,
    MARS_FINISH_LENGTH = 3,
    MARS_FINISH_CAPACITY = 4,
    MARS_FINISH_CANCELLED = 5,
    MARS_FINISH_DEADLINE = 6
} mars_finish_reason;

/* What one step added to one answer. It has no tokens for a prefill piece, or if the answer ended without any. */
typedef struct mars_event {
    size_t struct_size;
    int64_t row;      /* index of the prompt in a batch */
    const char* text; /* zero-terminated; incomplete characters and possible stop strings are held back */
    size_t text_size;
    const int64_t* token_ids;
    const double* confidences;
    size_t num_tokens;
    int32_t finish_reason; /* a mars_finish_reason */
} mars_event;

MARS_API void mars_event_init(mars_event* event, size_t struct_size);

/* Counts and times of one answer, in seconds from the start of the call. prefill_time ends with the first token. */
typedef struct mars_stats {
    size_t struct_size;
    int64_t prompt_tokens, tokens, forwards, prefill_forwards, tokens_after_first;
    double prefill_time, decode_time, time_to_first_token;
    double tokens_per_forward, tokens_per_second;
    const int64_t* accepted; /* accepted[k]: steps that accepted k tokens */
    size_t num_accepted;
    int64_t draft_tokens, accepted_draft_tokens, rejected_draft_tokens; /* tokens fed as draft tokens, those accepted, and the others */
    double queue_time;                                                  /* until the first forward */
    int64_t cached_tokens;                                              /* prompt tokens from the prefix cache */
    int64_t forced;                                                     /* tokens that a grammar forced, without a forward */
} mars_stats;

MARS_API void mars_stats_init(mars_stats* stats, size_t struct_size);

typedef struct mars_completion mars_completion;

/* For NULL: "", no array, MARS_NOT_FINISHED. */
MARS_API const char* mars_completion_text(const mars_completion* completion, size_t* text_size);
MARS_API const int64_t* mars_completion_token_ids(const mars_completion* completion, size_t* num_tokens);
MARS_API const double* mars_completion_confidences(const mars_completion* completion, size_t* num_tokens);
MARS_API mars_finish_reason mars_completion_finish_reason(const mars_completion* completion);
MARS_API mars_status mars_completion_stats(const mars_completion* completion, mars_stats* stats, mars_error** error);
MARS_API void mars_completion_free(mars_completion* completion);

/* Receives each event of an answer; a nonzero result ends that answer. The event is valid during the call. */
typedef int (*mars_on_event)(const mars_event* event, void* user);

/* Answer one prompt. `config` and `on_event` may be NULL. */
MARS_API mars_status mars_generate(const mars_session* session, const mars_prompt* prompt, const mars_config* config,
                                   mars_on_event on_event, void* user, mars_completion** completion, mars_error** error);
/* Answer several prompts as rows of one batch, with one config each and the same commit; fills completions[0 ... num
 * - 1]. */
MARS_API mars_status mars_generate_batch(const mars_session* session, const mars_prompt* const* prompts, const mars_config* const* configs,
                                         size_t num, mars_on_event on_event, void* user, mars_completion** completions, mars_error** error);

/* ---- streams: one answer, step by step ---- */

typedef struct mars_stream mars_stream;

/* Start an answer; nothing is computed before the first mars_stream_next. `config` may be NULL. */
MARS_API mars_status mars_stream_open(const mars_session* session, const mars_prompt* prompt, const mars_config* config,
                                      mars_stream** stream, mars_error** error);
/* Compute the next event. After the last one *done is 1 and the event is empty. An error ends the stream. */
MARS_API mars_status mars_stream_next(mars_stream* stream, mars_event* event, int32_t* done, mars_error** error);
/* From any thread: tau, or MARS_EXACT (NaN for NULL). A new value applies from the next step on; MARS_ERROR_SESSION if
 * it is out of range. */
MARS_API double mars_stream_tau(const mars_stream* stream);
MARS_API mars_status mars_stream_set_tau(mars_stream* stream, double tau, mars_error** error);
/* From any thread: end the answer, and its running step. An engine's step cannot be ended: it is the last one. */
MARS_API void mars_stream_cancel(mars_stream* stream);
/* The answer so far. */
MARS_API mars_status mars_stream_completion(const mars_stream* stream, mars_completion** completion, mars_error** error);
/* End the answer and free the stream. No effect on the stream of a conversation, which the conversation owns. */
MARS_API void mars_stream_close(mars_stream* stream);

/* ---- conversations: earlier turns are not read again ---- */

/* Turns of one user and the model. For one thread at a time; several conversations of a session may run in several
 * threads. */
typedef struct mars_conversation mars_conversation;

/* `system`: a system message, or NULL. `drop_oldest`, if nonzero: when the context is full, drop the oldest turns. */
MARS_API mars_status mars_conversation_open(const mars_session* session, const char* system, int32_t drop_oldest,
                                            mars_conversation** conversation, mars_error** error);
/* Ask, and stream the answer; an answer that still runs ends. *stream belongs to the conversation and is valid until
 * its next question or its close. A question that cannot be asked is an error and leaves the conversation unchanged. */
MARS_API mars_status mars_conversation_send(mars_conversation* conversation, const char* text, const mars_config* config,
                                            mars_stream** stream, mars_error** error);
/* Ask instead of the question of `turn`, counted from 0 (negative: from the end); later turns are dropped. */
MARS_API mars_status mars_conversation_edit(mars_conversation* conversation, const char* text, const mars_config* config, int64_t turn,
                                            mars_stream** stream, mars_error** error);
/* Remove the last turns; remove all; replace them (JSON as in mars_prompt). */
MARS_API mars_status mars_conversation_undo(mars_conversation* conversation, int64_t turns, mars_error** error);
MARS_API mars_status mars_conversation_reset(mars_conversation* conversation, mars_error** error);
MARS_API mars_status mars_conversation_resume(mars_conversation* conversation, const char* messages, mars_error** error);
/* The turns as JSON: [{"role": "user", "content": "..."}, ...]. Valid until the next call. */
MARS_API mars_status mars_conversation_messages(mars_conversation* conversation, const char** messages, mars_error** error);
/* Turns that the last question dropped to make room; 0 for NULL. */
MARS_API int64_t mars_conversation_dropped(const mars_conversation* conversation);
/* Free a conversation and its answer. */
MARS_API void mars_conversation_close(mars_conversation* conversation);

/* ---- batchers: requests of many threads as rows of one batch, which join and leave at any step ---- */

typedef struct mars_batcher mars_batcher;
typedef struct mars_request mars_request;

#define MARS_NO_LIMIT 0
#define MARS_FOREVER (-1.0) /* instead of seconds */

/* Limits on running work and on single requests; MARS_NO_LIMIT for no limit. */
typedef struct mars_limits {
    size_t struct_size;
    int64_t max_rows;          /* sequences in one forward; 0: 8, or fewer if an engine has fewer */
    int64_t max_waiting;       /* 64: requests that may wait, not counting the next ones for free rows */
    int64_t prefill_tokens;    /* 128: prompt tokens that are read between two decode steps, at most */
    int64_t max_prompt_tokens; /* no limit, like the following */
    int64_t max_new_tokens;
    int64_t max_stops;           /* stop strings, and eos_ids */
    int64_t kv_bytes;            /* KV memory of all rows */
    double client_share;         /* 1: share of all places that one client may have; above 0, at most 1 */
    int64_t max_rows_per_client; /* no limit: sequences of one client in one forward; its other requests wait, even if rows are free */
    int64_t
        cache_block; /* 1: with a tau, tokens whose KV entries become final together: 1 is cursor commit, more the paper's block commit */
} mars_limits;

MARS_API void mars_limits_init(mars_limits* limits, size_t struct_size);

/* Start a batcher over a session, which may be closed before it. `limits` may be NULL. */
MARS_API mars_status mars_batcher_open(const mars_session* session, const mars_limits* limits, mars_batcher** batcher, mars_error** error);

/* How a request is queued. */
typedef struct mars_entry {
    size_t struct_size;
    double wait;        /* 0: seconds to wait for room; MARS_FOREVER: until its deadline */
    const char* client; /* whose turn and share of places it takes; NULL: none */
    mars_on_event
        on_event; /* NULL: use mars_request_next; otherwise called with each event, usually in the batcher's thread: every row waits for it */
    void* user;
} mars_entry;

MARS_API void mars_entry_init(mars_entry* entry, size_t struct_size);

/* Queue a prompt; returns once it is tokenized. `config` and `entry` may be NULL; cache_block must be 1: a batcher has it in mars_limits. */
MARS_API mars_status mars_batcher_submit(mars_batcher* batcher, const mars_prompt* prompt, const mars_config* config,
                                         const mars_entry* entry, mars_request** request, mars_error** error);
/* Wait for the next event. After the last one *done is 1 and the event is empty. A failed request returns its error. */
MARS_API mars_status mars_request_next(mars_request* request, mars_event* event, int32_t* done, mars_error** error);
/* Wait for the whole answer, at most `timeout` seconds, or MARS_FOREVER. MARS_ERROR_SESSION if it is not finished then;
 * the request continues. */
MARS_API mars_status mars_request_result(mars_request* request, double timeout, mars_completion** completion, mars_error** error);
/* The answer so far, without waiting for a step; why it ended, or MARS_NOT_FINISHED. */
MARS_API mars_status mars_request_completion(const mars_request* request, mars_completion** completion, mars_error** error);
MARS_API mars_finish_reason mars_request_finish_reason(const mars_request* request);
/* Tau and cancellation, as for streams. */
MARS_API double mars_request_tau(const mars_request* request);
MARS_API mars_status mars_request_set_tau(mars_request* request, double tau, mars_error** error);
MARS_API void mars_request_cancel(mars_request* request);
/* End the answer if it still runs, and free the request; no callback is called afterwards. A request may outlive its
 * batcher. */
MARS_API void mars_request_free(mars_request* request);

/* Counts so far, and current state. */
typedef struct mars_batcher_state {
    size_t struct_size;
    int64_t accepted;                             /* got a place; each ends as one of the next four */
    int64_t finished, failed, cancelled, expired; /* failed: with an error; expired: its deadline passed */
    int64_t refused, overloaded;                  /* the request was invalid; there was no room */
    int64_t prompt_tokens, tokens;                /* of accepted requests that have ended */
    int64_t num_running, num_waiting;             /* with a row, and without one yet */
    double kv_usage, step_seconds;                /* 0 to 1; how long the current step has been running, 0 between steps */
    int32_t alive;                                /* whether it takes requests */
} mars_batcher_state;

MARS_API void mars_batcher_state_init(mars_batcher_state* state, size_t struct_size);
/* The state now; never waits for a step. */
MARS_API mars_status mars_batcher_describe(const mars_batcher* batcher, mars_batcher_state* state, mars_error** error);

/* Take no more requests, give the present ones `drain` seconds to finish, then cancel the rest and end the thread.
 * Waits for the current step, at most `timeout` seconds or MARS_FOREVER; *ended is 0 if it still hangs. `ended` may
 * be NULL. */
MARS_API mars_status mars_batcher_close(mars_batcher* batcher, double drain, double timeout, int32_t* ended, mars_error** error);
/* Close it, and free it. */
MARS_API void mars_batcher_free(mars_batcher* batcher);

#ifdef __cplusplus
}
#endif

#endif
