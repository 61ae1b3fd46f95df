/* The C interface of libmars: open a bundle, turn prompts into tokens. docs/cpp.md is its guide.
 *
 * Rules that hold everywhere:
 * - Every struct begins with struct_size, set it to sizeof the struct (the *_init functions do). Structs only ever grow at the
 *   end; what an older caller does not know keeps its default. A newer caller's field that this library does not know must be 0,
 *   and is set to 0 in what the library fills.
 * - A function that can fail returns a mars_status and, where `error` is not NULL, leaves a mars_error there; free it.
 * - Strings are UTF-8. Strings and arrays that the library returns belong to the handle they were asked of, and are good until the
 *   next call on it or its end. What a caller passes in is copied before the call returns.
 * - No exception leaves the library; it prints nothing and keeps no global state.
 * - Threads: a session serves any number of threads. A stream and a completion belong to one thread at a time, except for
 *   mars_stream_tau, mars_stream_set_tau and mars_stream_cancel, which any thread may call while another is in mars_stream_next.
 *   A batcher and its requests serve any number of threads; the event of mars_request_next is good until the next call of that.
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

/* Raised when a program built against an older header would no longer work. */
#define MARS_ABI_VERSION 3

/* MARS_ABI_VERSION of the library that runs, and its version such as "0.1.0". */
MARS_API uint32_t mars_abi_version(void);
MARS_API const char* mars_version(void);

/* ---- errors ---- */

typedef enum mars_status {
    MARS_OK = 0,
    MARS_ERROR_BUNDLE = 1,    /* the bundle is damaged, unsafe, or of a format this library does not read */
    MARS_ERROR_SESSION = 2,   /* the bundle is fine but cannot run here, or the request cannot be served as it stands */
    MARS_ERROR_ARGUMENT = 3,  /* this interface was used wrongly: a NULL, a wrong struct_size, an unknown constant */
    MARS_ERROR_MEMORY = 4,    /* no memory for it now */
    MARS_ERROR_INTERNAL = 5,  /* a fault of this library, or an exception of the caller's callback */
    MARS_ERROR_DEVICE = 6,    /* a step failed on the device; the request was right */
    MARS_ERROR_OVERLOADED = 7 /* a batcher has no room for it now: mars_error_retry_after says when there may be some */
} mars_status;

typedef struct mars_error mars_error;

MARS_API mars_status mars_error_status(const mars_error* error);
/* What is wrong, where, and what to do; may have several lines. */
MARS_API const char* mars_error_message(const mars_error* error);
/* Seconds from now after which there may be room, a guess; 0 for other errors than MARS_ERROR_OVERLOADED. */
MARS_API double mars_error_retry_after(const mars_error* error);
MARS_API void mars_error_free(mars_error* error);

/* ---- sessions ---- */

typedef struct mars_session mars_session;

#define MARS_CACHE_AUTO (-1)

/* Whether files are hashed: where an earlier start did not find them good, always, or never (sizes are looked at in any case). */
typedef enum mars_verify { MARS_VERIFY_ONCE = 0, MARS_VERIFY_ALWAYS = 1, MARS_VERIFY_NEVER = 2 } mars_verify;

typedef enum mars_log_level { MARS_LOG_DEBUG = 0, MARS_LOG_INFO = 1, MARS_LOG_WARNING = 2, MARS_LOG_ERROR = 3 } mars_log_level;
/* Hears one line of a session's log, from any thread, until the session and its streams are closed. The line is good during the call. */
typedef void (*mars_on_log)(int32_t level, const char* line, void* user);

typedef struct mars_session_options {
    size_t struct_size;
    const char* device;  /* an execution provider: "cpu", "cuda", "cuda:1", "tensorrt", ...; NULL: "cpu". A missing one is an error */
    int32_t threads;     /* compute threads; 0: the backend's choice */
    int32_t verify;      /* a mars_verify: whether files are hashed */
    const char* variant; /* NULL: the first that runs here */
    int64_t cache_bytes; /* for KV entries of what was read before; 0: keep none; MARS_CACHE_AUTO (default): a small share of free memory */
    int32_t safe;        /* not 0: the bundle may be anybody's; all is hashed, no engine runs, sizes are limited (docs/security.md) */
    int32_t
        parse_special; /* not 0: a special token's text, such as <|im_end|>, is that token inside messages, too; it is plain text by default */
    const char* const* option_names; /* settings of ONNX Runtime by its own names: with a dot a session's, without one the provider's */
    const char* const* option_values;
    size_t num_options;
    mars_on_log on_log; /* NULL: silence */
    void* log_user;
    int32_t strict;        /* not 0: it is an error that a GPU's provider leaves operators on hidden states to the CPU */
    int32_t cuda_priority; /* of the stream that a TensorRT engine makes for itself */
    void* cuda_stream;     /* a cudaStream_t on which steps run on CUDA; it outlives the session, and nobody else uses it during a step */
} mars_session_options;

typedef struct mars_session_info {
    size_t struct_size;
    int64_t vocab_size, context_length, block, mask_id;
    int32_t has_text;                          /* whether prompts may be text; else only token ids */
    int32_t reserved;                          /* 0 */
    const char *variant, *backend, *precision; /* of the graph or engine that runs */
    const char* device;                        /* where it was opened: "cpu", "cuda", "cuda:1", ... */
    const int64_t* eos_ids;
    size_t num_eos_ids;
    const char* const* profiles; /* the calibrated ones that count for what runs; stale ones are left out */
    size_t num_profiles;
    const char* const* outputs; /* what the graph can give, such as "logits" */
    size_t num_outputs;
    int64_t max_rows; /* most sequences of one forward: those that an engine was built for; 0 for no limit */
} mars_session_info;

MARS_API void mars_session_options_init(mars_session_options* options, size_t struct_size);
MARS_API void mars_session_info_init(mars_session_info* info, size_t struct_size);

/* Open the bundle directory `path`. `options` may be NULL. */
MARS_API mars_status mars_session_open(const char* path, const mars_session_options* options, mars_session** session, mars_error** error);
/* Free a session. Its streams stay usable; the bundle is let go with the last of them. */
MARS_API void mars_session_close(mars_session* session);
MARS_API mars_status mars_session_describe(const mars_session* session, mars_session_info* info, mars_error** error);

/* See to it that what a step costs is known, so that no request waits for it: about a second, unless an earlier session of this user wrote it
 * down. */
MARS_API mars_status mars_session_warm_up(const mars_session* session, mars_error** error);
/* Take these seconds of steps by their positions (rows x slots, rising) for what a step costs, and measure nothing. */
MARS_API mars_status mars_session_set_cost(const mars_session* session, const int64_t* positions, const double* seconds, size_t num,
                                           mars_error** error);

/* The store of KV entries of a session (docs/conversations.md). */
typedef struct mars_prefix_stats {
    size_t struct_size;
    int64_t queries, hits;            /* prompts that were looked up, and those of which something was there */
    int64_t query_tokens, hit_tokens; /* of all these prompts, and those of them that were there */
    int64_t saved, evicted, failed;   /* entries that came, that went because memory was short, that could not be copied */
    int64_t entries, num_bytes;       /* what is there now */
} mars_prefix_stats;

MARS_API void mars_prefix_stats_init(mars_prefix_stats* stats, size_t struct_size);
MARS_API mars_status mars_session_prefix_stats(const mars_session* session, mars_prefix_stats* stats, mars_error** error);
/* Give the memory of the store back. */
MARS_API mars_status mars_session_forget_prefixes(const mars_session* session, mars_error** error);

/* ---- requests ---- */

typedef enum mars_metric { MARS_PROBABILITY = 0, MARS_MARGIN = 1, MARS_ENTROPY = 2 } mars_metric;
typedef enum mars_commit { MARS_COMMIT_CURSOR = 0, MARS_COMMIT_BLOCK = 1 } mars_commit;

#define MARS_WINDOW_AUTO 0    /* as many as is fastest, chosen step by step */
#define MARS_WINDOW_FULL (-1) /* the bundle's block */
#define MARS_EXACT (-1.0)     /* in place of a tau: several tokens a step, and the very text of one token a step */

/* Settings of one request. */
typedef struct mars_config {
    size_t struct_size;
    double tau;             /* MARS_EXACT (default), or a confidence bound, the speed/quality knob; 1 (entropy: 0) is one token a step */
    int32_t metric;         /* a mars_metric: what tau bounds */
    int32_t commit;         /* a mars_commit: which cache loop decodes */
    int64_t cache_block;    /* tokens of a block with MARS_COMMIT_BLOCK; 32 */
    int64_t max_new_tokens; /* 256 */
    int64_t window;         /* most predictions of new positions in one step: a number, MARS_WINDOW_AUTO (default) or MARS_WINDOW_FULL */
    const int64_t* eos_ids; /* NULL: the model's own. Not NULL with num_eos_ids 0: none */
    size_t num_eos_ids;
    const char* const* stop; /* strings that end the text and are not part of it */
    size_t num_stop;
    double temperature;        /* 0 is greedy; above it a candidate's own probability is compared with tau */
    int64_t top_k;             /* 0 is off */
    double top_p;              /* 1 is off */
    uint64_t seed;             /* draws depend on it and on the position only */
    double repetition_penalty; /* 1 is off */
    int64_t lookup;            /* exact only: propose what followed the last so many tokens where they stood before; 0 is off */
    double min_p;              /* keep tokens at least that much as likely as the likeliest; 0 is off */
    const char* cache_salt;    /* only requests with the same one share KV entries; NULL: "" */
    double deadline;           /* seconds after which the answer ends with what it has; 0: none */
    const char* grammar;       /* the name of a grammar of the bundle that the answer follows; NULL: none */
} mars_config;

MARS_API void mars_config_init(mars_config* config, size_t struct_size);
/* Set tau, metric and window to those of a calibrated profile; a stale profile is an error that says how to renew it. */
MARS_API mars_status mars_config_of_profile(const mars_session* session, const char* name, mars_config* config, mars_error** error);

/* A prompt: exactly one of the three is not NULL. */
typedef struct mars_prompt {
    size_t struct_size;
    const char* text;     /* continued as it stands */
    size_t text_size;     /* bytes; SIZE_MAX (default): up to the first zero byte */
    const char* messages; /* JSON: [{"role": "user", "content": "..."}, ...], put into the chat template */
    const int64_t* token_ids;
    size_t num_token_ids;
} mars_prompt;

MARS_API void mars_prompt_init(mars_prompt* prompt, size_t struct_size);

/* Number of token ids of a prompt, into *num_ids; the ids too if `capacity` is at least that. `ids` may be NULL with capacity 0. */
MARS_API mars_status mars_encode(const mars_session* session, const mars_prompt* prompt, int64_t* ids, size_t capacity, size_t* num_ids,
                                 mars_error** error);
/* Number of bytes of the text of token ids, into *text_size; the text and a zero byte too if `capacity` is greater than that. */
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

/* What one step added to one answer; no tokens for a part of the prompt, or for an end without any. */
typedef struct mars_event {
    size_t struct_size;
    int64_t row;      /* which prompt of a batch */
    const char* text; /* may lag behind the tokens: half characters and possible stop strings are held back; ends with a zero byte */
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
    const int64_t* accepted; /* accepted[k]: steps that gave k tokens */
    size_t num_accepted;
    int64_t proposed, verified, rejected; /* tokens fed to be verified, those that held, and the others */
    double queue_time;                    /* until the first forward */
    int64_t cached_tokens;                /* prompt tokens whose KV entries were there before */
    int64_t forced;                       /* tokens that a grammar gave, without a forward */
} mars_stats;

MARS_API void mars_stats_init(mars_stats* stats, size_t struct_size);

typedef struct mars_completion mars_completion;

/* Of NULL: "", no array, MARS_NOT_FINISHED. */
MARS_API const char* mars_completion_text(const mars_completion* completion, size_t* text_size);
MARS_API const int64_t* mars_completion_token_ids(const mars_completion* completion, size_t* num_tokens);
MARS_API const double* mars_completion_confidences(const mars_completion* completion, size_t* num_tokens);
MARS_API mars_finish_reason mars_completion_finish_reason(const mars_completion* completion);
MARS_API mars_status mars_completion_stats(const mars_completion* completion, mars_stats* stats, mars_error** error);
MARS_API void mars_completion_free(mars_completion* completion);

/* Sees each event of an answer; not 0 stops that answer. The event is good during the call only. */
typedef int (*mars_on_event)(const mars_event* event, void* user);

/* Answer one prompt. `config` and `on_event` may be NULL. */
MARS_API mars_status mars_generate(const mars_session* session, const mars_prompt* prompt, const mars_config* config,
                                   mars_on_event on_event, void* user, mars_completion** completion, mars_error** error);
/* Answer several prompts as rows of one batch, one config each and all with the same commit; fills completions[0 ... num - 1]. */
MARS_API mars_status mars_generate_batch(const mars_session* session, const mars_prompt* const* prompts, const mars_config* const* configs,
                                         size_t num, mars_on_event on_event, void* user, mars_completion** completions, mars_error** error);

/* ---- streams: one answer, step by step ---- */

typedef struct mars_stream mars_stream;

MARS_API mars_status mars_stream_open(const mars_session* session, const mars_prompt* prompt, const mars_config* config,
                                      mars_stream** stream, mars_error** error);
/* Make the next event. *done is 1, and the event empty, after the last one. An error ends the stream. */
MARS_API mars_status mars_stream_next(mars_stream* stream, mars_event* event, int32_t* done, mars_error** error);
/* Any thread: the confidence bound, or MARS_EXACT (not a number for NULL); the next step uses a new one. */
MARS_API double mars_stream_tau(const mars_stream* stream);
MARS_API mars_status mars_stream_set_tau(mars_stream* stream, double tau, mars_error** error);
/* Any thread: end the answer now; on ONNX Runtime also in the middle of a step. */
MARS_API void mars_stream_cancel(mars_stream* stream);
/* The answer so far. */
MARS_API mars_status mars_stream_completion(const mars_stream* stream, mars_completion** completion, mars_error** error);
/* End the answer where it is and free it. Nothing for the stream of a conversation, which owns it. */
MARS_API void mars_stream_close(mars_stream* stream);

/* ---- conversations: what was said is not read again ---- */

/* Turns of one user and the model. For one thread at a time; several conversations of a session may run in several threads. */
typedef struct mars_conversation mars_conversation;

/* `system`: a system message, or NULL. `drop_oldest`, if not 0: at the context's end the turns behind the system message go. */
MARS_API mars_status mars_conversation_open(const mars_session* session, const char* system, int32_t drop_oldest,
                                            mars_conversation** conversation, mars_error** error);
/* Ask, and stream the answer. *stream belongs to the conversation and is valid until its next question or its close. An answer that still
 * runs ends. What cannot be asked is an error, and leaves the conversation as it was. */
MARS_API mars_status mars_conversation_send(mars_conversation* conversation, const char* text, const mars_config* config,
                                            mars_stream** stream, mars_error** error);
/* The same in place of the question of `turn`, counted from 0, from the end below 0; all behind it is forgotten. */
MARS_API mars_status mars_conversation_edit(mars_conversation* conversation, const char* text, const mars_config* config, int64_t turn,
                                            mars_stream** stream, mars_error** error);
/* Take the last turns back; forget all of them; put others in their place (JSON, as mars_prompt has messages). */
MARS_API mars_status mars_conversation_undo(mars_conversation* conversation, int64_t turns, mars_error** error);
MARS_API mars_status mars_conversation_reset(mars_conversation* conversation, mars_error** error);
MARS_API mars_status mars_conversation_resume(mars_conversation* conversation, const char* messages, mars_error** error);
/* What was said, as JSON: [{"role": "user", "content": "..."}, ...]. Good until the next call. */
MARS_API mars_status mars_conversation_messages(mars_conversation* conversation, const char** messages, mars_error** error);
/* Turns that the last question let go to make room; 0 for NULL. */
MARS_API int64_t mars_conversation_dropped(const mars_conversation* conversation);
MARS_API void mars_conversation_close(mars_conversation* conversation);

/* ---- batchers: the requests of many threads as rows of one batch, which join and leave at any step ---- */

typedef struct mars_batcher mars_batcher;
typedef struct mars_request mars_request;

#define MARS_NO_LIMIT 0
#define MARS_FOREVER (-1.0) /* in place of seconds */

/* How much runs at once, and how much one request may ask for; MARS_NO_LIMIT where that may be. */
typedef struct mars_limits {
    size_t struct_size;
    int64_t max_rows;          /* sequences in one forward, each with KV memory for the longest; 0: 8, or fewer if an engine has fewer */
    int64_t max_waiting;       /* 64: requests that may wait, beside those that free rows are about to take */
    int64_t prefill_tokens;    /* 128: prompt tokens that are read between two decode steps, at most */
    int64_t max_prompt_tokens; /* no limit, as the next ones */
    int64_t max_new_tokens;
    int64_t max_stops;           /* stop strings, and eos_ids */
    int64_t kv_bytes;            /* KV memory of the whole batch */
    double client_share;         /* 1: of all places what one client may have, above 0, at most 1 */
    int64_t max_rows_per_client; /* no limit: sequences of one client in one forward; its others wait, also where rows are free */
} mars_limits;

MARS_API void mars_limits_init(mars_limits* limits, size_t struct_size);

/* Start a batcher over a session, which may be closed before it. `limits` may be NULL. What a step costs is measured first. */
MARS_API mars_status mars_batcher_open(const mars_session* session, const mars_limits* limits, mars_batcher** batcher, mars_error** error);

/* How a request comes in. */
typedef struct mars_entry {
    size_t struct_size;
    double wait;            /* 0: seconds to wait for room; MARS_FOREVER: until its deadline */
    const char* client;     /* NULL: nobody's; whose turn it takes, and whose share of the places */
    mars_on_event on_event; /* NULL: events are asked for; else called with each, mostly in the batcher's thread: every row waits for it */
    void* user;
} mars_entry;

MARS_API void mars_entry_init(mars_entry* entry, size_t struct_size);

/* Queue a prompt; returns once it is tokenized. `config` and `entry` may be NULL; commit must be MARS_COMMIT_CURSOR. */
MARS_API mars_status mars_batcher_submit(mars_batcher* batcher, const mars_prompt* prompt, const mars_config* config,
                                         const mars_entry* entry, mars_request** request, mars_error** error);
/* Wait for the next event. *done is 1, and the event empty, after the last one. What made the request fail is the error. */
MARS_API mars_status mars_request_next(mars_request* request, mars_event* event, int32_t* done, mars_error** error);
/* Wait for the whole answer, at most so many seconds, or MARS_FOREVER. */
MARS_API mars_status mars_request_result(mars_request* request, double timeout, mars_completion** completion, mars_error** error);
/* The answer so far, which never waits for a step; why it ended, MARS_NOT_FINISHED while it runs. */
MARS_API mars_status mars_request_completion(const mars_request* request, mars_completion** completion, mars_error** error);
MARS_API mars_finish_reason mars_request_finish_reason(const mars_request* request);
/* As those of a stream. */
MARS_API double mars_request_tau(const mars_request* request);
MARS_API mars_status mars_request_set_tau(mars_request* request, double tau, mars_error** error);
MARS_API void mars_request_cancel(mars_request* request);
/* End the answer if it still runs, and free it; no callback is called from then on. A request may outlive its batcher. */
MARS_API void mars_request_free(mars_request* request);

/* What was done so far, and what is going on. */
typedef struct mars_batcher_state {
    size_t struct_size;
    int64_t accepted;                             /* given a place; each ends as one of the next four */
    int64_t finished, failed, cancelled, expired; /* failed: with an error; expired: its deadline came */
    int64_t refused, overloaded;                  /* for what was wrong with it, for want of room */
    int64_t prompt_tokens, tokens;                /* of accepted ones that have ended */
    int64_t num_running, num_waiting;             /* with a row, and without one yet */
    double kv_usage, step_seconds;                /* 0 to 1; how long the step in hand has been running, 0 between steps */
    int32_t alive;                                /* whether it takes requests */
} mars_batcher_state;

MARS_API void mars_batcher_state_init(mars_batcher_state* state, size_t struct_size);
MARS_API mars_status mars_batcher_describe(const mars_batcher* batcher, mars_batcher_state* state, mars_error** error);

/* Take no more requests, give those that are here `drain` seconds to finish, then cancel what is left and end the thread. Waits for the
 * step in hand, at most `timeout` seconds or MARS_FOREVER: *ended is 0 if it still hangs. `ended` may be NULL. */
MARS_API mars_status mars_batcher_close(mars_batcher* batcher, double drain, double timeout, int32_t* ended, mars_error** error);
/* Close it, and free it. */
MARS_API void mars_batcher_free(mars_batcher* batcher);

#ifdef __cplusplus
}
#endif

#endif
