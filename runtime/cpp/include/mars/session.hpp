// An opened bundle on a device: prompts in, completions or streams out.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <mars/config.hpp>
#include <mars/errors.hpp>
#include <mars/export.hpp>
#include <mars/stats.hpp>
#include <mars/text.hpp>

namespace mars {

/// A prompt: a text as it is, "Once upon"; chat messages, {{"user", "hi"}}; or token ids, {1, 2, 3}.
class Prompt {
  public:
    Prompt() = default; // an empty text, which is refused
    Prompt(std::string text) : value_(std::move(text)) {}
    Prompt(const char* text) : value_(std::string(text)) {}
    Prompt(std::vector<Message> messages) : value_(std::move(messages)) {}
    /// `thinking`: the chat template's `enable_thinking`; SessionInfo::switches_thinking says whether it can be given.
    Prompt(std::vector<Message> messages, std::optional<bool> thinking) : value_(std::move(messages)), thinking_(thinking) {}
    Prompt(std::initializer_list<Message> messages) : value_(std::vector<Message>(messages)) {}
    Prompt(std::vector<std::int64_t> token_ids) : value_(std::move(token_ids)) {}
    Prompt(std::initializer_list<std::int64_t> token_ids) : value_(std::vector<std::int64_t>(token_ids)) {}

    /// The value of its kind; nullptr for the other kinds.
    const std::string* text() const { return std::get_if<std::string>(&value_); }
    const std::vector<Message>* messages() const { return std::get_if<std::vector<Message>>(&value_); }
    const std::vector<std::int64_t>* token_ids() const { return std::get_if<std::vector<std::int64_t>>(&value_); }

    std::optional<bool> thinking() const { return thinking_; }

  private:
    std::variant<std::string, std::vector<Message>, std::vector<std::int64_t>> value_;
    std::optional<bool> thinking_;
};

/// A finished answer. `text` is "" for a bundle without a tokenizer; `confidences[i]` belongs to `token_ids[i]`.
struct Completion {
    std::string text;
    std::vector<std::int64_t> token_ids;
    std::vector<double> confidences;
    FinishReason finish_reason = FinishReason::cancelled;
    Stats stats;
};

/// The addition of one step to one answer. It has no tokens for a prefill piece, or if the answer ended without any.
///
/// Incomplete characters and possible stop strings are held back from `text`. `row`: index of the
/// prompt in a batch. The first `accepted_draft_tokens` tokens were verified draft tokens.
struct Event {
    std::string text;
    std::vector<std::int64_t> token_ids;
    std::vector<double> confidences;
    std::optional<FinishReason> finish_reason;
    std::int64_t row = 0;
    std::int64_t accepted_draft_tokens = 0;
    std::vector<std::int64_t> forced = {}; ///< indices of tokens that a grammar forced
};

/// Receives each event of an answer; returning true ends the answer. Its exceptions end the call and reach the caller.
using OnEvent = std::function<bool(const Event&)>;

class Stream;
class Conversation;
class Batcher;
struct Opened;
struct Answers;

/// Properties of a session, from the bundle's manifest (docs/format.md).
struct SessionInfo {
    std::string variant, backend, precision; ///< of the running graph or engine
    std::string device;                      ///< "cpu", "cuda", "cuda:1", ...
    std::vector<std::string> outputs;        ///< the graph's outputs, such as "logits"
    std::int64_t vocab_size = 0;
    std::int64_t context_length = 0;     ///< most tokens of a row, prompt and answer together
    std::int64_t block = 0, mask_id = 0; ///< mask_id: -1 for a model without a mask token
    std::vector<std::int64_t> eos_ids;
    std::vector<std::string> profiles;    ///< profiles that are valid for the running variant
    bool has_text = false;                ///< whether prompts may be text: a tokenizer that this library supports
    bool has_thinking = false;            ///< whether the chat template marks thinking
    bool switches_thinking = false;       ///< whether a prompt of messages can turn it on and off
    std::optional<std::int64_t> max_rows; ///< most sequences in one forward, if an engine limits them
};

/// Version and file of the ONNX Runtime that graphs run on, such as "1.32.0, /usr/lib/libonnxruntime.so.1". Loads it.
///
/// Throws SessionError if it cannot be loaded.
MARS_API std::string onnxruntime_library();

/// A bundle opened on a device. Thread-safe: each call owns its rows and their KV memory.
class MARS_API Session {
  public:
    struct Options {
        /// An execution provider's name, optionally with a GPU's number ("cuda:1", among the GPUs that
        /// CUDA_VISIBLE_DEVICES shows). A missing device is an error; there is no fallback.
        std::string device = "cpu";
        std::optional<int> threads = {};         ///< compute threads; default: the backend's choice
        std::optional<std::string> variant = {}; ///< default: the first that runs here
        Verify verify = Verify::once;            ///< when files are hashed
        /// Memory of the prefix cache; 0 turns it off. Default: a sixteenth of the free memory, at most 1 GiB.
        std::optional<std::int64_t> cache_bytes = std::nullopt;
        /// For bundles of unknown origin: hash everything, remember nothing, run no engines, limit sizes.
        bool safe = false;
        /// Whether the text of a special token inside a message, such as <|im_end|>, becomes that token. By default it
        /// is plain text there, so that the author of a message cannot end a turn. In prompts given as one text it
        /// always becomes the token.
        bool parse_special = false;
        /// Options of ONNX Runtime by its own names: with a dot for the session ({"session.intra_op.allow_spinning",
        /// "0"}), without a dot for the execution provider ({"device_id", "1"}). Engines take none.
        std::map<std::string, std::string> options = {};
        /// A cudaStream_t on which CUDA steps run, such as that of a robot's perception. It must outlive the session,
        /// and may not be used for other work during a step. By default an engine creates a stream.
        void* cuda_stream = nullptr;
        /// Prompt tokens of one step of `generate` and `stream`, at most. Fewer: other streams and cancellation wait less for a step,
        /// and a prompt takes longer. A batcher has its own in Limits.
        std::int64_t prefill_tokens = 256;
        /// Receives what was opened, and the log of ONNX Runtime or TensorRT. Default: nothing is logged.
        OnLog on_log = nullptr;
    };

    /// Open the bundle at `path`. Throws BundleError for a bad bundle, SessionError if no variant runs here or an option
    /// is invalid, and MemoryError if it does not fit the free memory.
    static Session open(const std::filesystem::path& path, const Options& options);
    static Session open(const std::filesystem::path& path) { return open(path, Options()); }

    /// Answer one prompt. `on_event` receives each event in this thread and ends the answer by returning true. `cache_block`: as in
    /// Limits. Throws SessionError for a request that cannot be served, DeviceError for a failed step, and what `on_event` throws.
    Completion generate(const Prompt& prompt, const GenerationConfig& config = {}, const OnEvent& on_event = nullptr,
                        std::int64_t cache_block = 1) const;

    /// Answer several prompts as rows of one batch, each with its own config; completion i belongs to prompt i. If
    /// `on_event` returns true, only that row ends. Throws as `generate` does; an error ends all rows.
    std::vector<Completion> generate_batch(const std::vector<Prompt>& prompts, const std::vector<GenerationConfig>& configs,
                                           const OnEvent& on_event = nullptr, std::int64_t cache_block = 1) const;

    /// Answer one prompt step by step. Throws SessionError for a request that cannot be served.
    Stream stream(const Prompt& prompt, const GenerationConfig& config = {}, std::int64_t cache_block = 1) const;

    /// Start a conversation. `drop_oldest`: when the context is full, drop the oldest turns. Throws SessionError
    /// without a tokenizer.
    Conversation conversation(std::optional<std::string> system = std::nullopt, bool drop_oldest = false) const;

    /// Run one step, so that no request waits for what the first one allocates.
    void warm_up() const;

    /// Set the cost of a step instead of learning it from the steps that run, so that every run has the same numbers of masks. `points`: positions of a
    /// step (rows x slots), rising, and its seconds, both above 0. Throws SessionError otherwise.
    void set_cost(std::vector<std::pair<std::int64_t, double>> points) const;

    /// Statistics of the prefix cache since the session was opened.
    PrefixStats prefix_stats() const;

    void forget_prefixes() const;

    /// Token ids of a prompt. Throws SessionError if it is empty or too long, or contains ids outside the vocabulary.
    std::vector<std::int64_t> encode(const Prompt& prompt) const;

    /// The text of token ids, special tokens left out. Throws SessionError for a bundle without a tokenizer.
    std::string decode(const std::vector<std::int64_t>& token_ids) const;

    /// Throws SessionError for values out of range, and if this variant's graph lacks what `config` needs.
    void check(const GenerationConfig& config) const;

    /// A decoder of token ids as they come. Throws SessionError for a bundle without a tokenizer.
    TextStream text_stream() const;

    /// A splitter of the answer to a prompt of messages; no value if the chat template marks no thinking.
    std::optional<ThinkingStream> thinking_stream(const Prompt& prompt) const;

    SessionInfo info() const;

    /// The settings of a profile: tau, metric and masks. Throws SessionError for an
    /// unknown profile, and for a stale one, which was made for another graph, other weights or another precision.
    GenerationConfig config_of_profile(const std::string& name) const;

  private:
    friend class Batcher;
    friend struct Opened;
    explicit Session(std::shared_ptr<const Opened> opened) : opened_(std::move(opened)) {}

    std::shared_ptr<const Opened> opened_;
};

/// One answer, computed step by step as `next` is called. Keeps the session's bundle open.
///
/// For one thread at a time, except tau, exact and cancel().
class MARS_API Stream {
  public:
    Stream(Stream&&) noexcept = default;
    Stream& operator=(Stream&&) noexcept = default;

    /// The next event; no value after the last one. Throws SessionError; the stream has then ended.
    std::optional<Event> next();

    /// From any thread: tau; no value in exact mode. A new value applies from the next step on and ends exact mode.
    /// Throws SessionError if it is out of range.
    std::optional<double> tau() const;
    void set_tau(double tau);

    /// From any thread, at any time: exact mode. The rest of the text then continues as one token at a time would.
    /// Leaving it sets default_tau.
    bool exact() const { return !tau(); }
    void set_exact(bool exact);

    /// From any thread: end the answer, and its running step. An engine's step cannot be ended: it is the last one.
    void cancel();

    /// End the answer now, free its memory, and keep its entries in the prefix cache.
    void close();

    /// Whether the answer has ended, and whether a step's error ended it.
    bool is_over() const;
    bool failed() const;

    /// Counts and times so far.
    const Stats& stats() const;

    /// The answer so far; `finish_reason` is cancelled until it is finished.
    Completion completion() const;

  private:
    friend class Session;
    friend class Conversation;
    explicit Stream(std::shared_ptr<Answers> answers) : answers_(std::move(answers)) {}

    std::shared_ptr<Answers> answers_; // never shared
};

} // namespace mars
