// An opened bundle on a device: prompts in, completions or streams out. Picks the variant that fits, or says why none does.
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

/// What is asked: a text as it stands, "Once upon"; chat messages, {{"user", "hi"}}; or token ids, {1, 2, 3}.
class Prompt {
  public:
    Prompt() = default; // an empty text, which no session answers
    Prompt(std::string text) : value_(std::move(text)) {}
    Prompt(const char* text) : value_(std::string(text)) {}
    Prompt(std::vector<Message> messages) : value_(std::move(messages)) {}
    Prompt(std::initializer_list<Message> messages) : value_(std::vector<Message>(messages)) {}
    Prompt(std::vector<std::int64_t> token_ids) : value_(std::move(token_ids)) {}
    Prompt(std::initializer_list<std::int64_t> token_ids) : value_(std::vector<std::int64_t>(token_ids)) {}

    /// What it is, and nullptr for what it is not.
    const std::string* text() const { return std::get_if<std::string>(&value_); }
    const std::vector<Message>* messages() const { return std::get_if<std::vector<Message>>(&value_); }
    const std::vector<std::int64_t>* token_ids() const { return std::get_if<std::vector<std::int64_t>>(&value_); }

  private:
    std::variant<std::string, std::vector<Message>, std::vector<std::int64_t>> value_;
};

/// Which cache loop decodes: cursor (default), or block with blocks of `cache_block` tokens (the paper's loop).
struct Commit {
    enum class Kind { cursor, block };
    Kind kind = Kind::cursor;
    std::int64_t cache_block = 32;
};

/// A finished answer. `text` is "" for a bundle without a tokenizer; `confidences[i]` belongs to `token_ids[i]`.
struct Completion {
    std::string text;
    std::vector<std::int64_t> token_ids;
    std::vector<double> confidences;
    FinishReason finish_reason = FinishReason::cancelled;
    Stats stats;
};

/// What one step added to one answer; no tokens for a prefill chunk, or for an end without any.
///
/// `text` may lag behind the tokens: half characters and possible stop strings are held back. `row`: which prompt of a batch. The first
/// `verified` tokens had been proposed and held.
struct Event {
    std::string text;
    std::vector<std::int64_t> token_ids;
    std::vector<double> confidences;
    std::optional<FinishReason> finish_reason;
    std::int64_t row = 0;
    std::int64_t verified = 0;
    std::vector<std::int64_t> forced = {}; ///< the places of tokens that a grammar gave
};

/// Sees each event of an answer; true stops it. What it throws ends the call and reaches the caller.
using OnEvent = std::function<bool(const Event&)>;

class Stream;
class Conversation;
class Batcher;
struct Opened;
struct Answers;

/// A session in words and numbers, as the bundle's manifest has them (docs/format.md).
struct SessionInfo {
    std::string variant, backend, precision; ///< of the graph or engine that runs
    std::string device;                      ///< "cpu", "cuda", "cuda:1", ...: where it was opened
    std::vector<std::string> outputs;        ///< what the graph can give, such as "logits"
    std::int64_t vocab_size = 0;
    std::int64_t context_length = 0; ///< most tokens that a row can hold, prompt and answer together
    std::int64_t block = 0, mask_id = 0;
    std::vector<std::int64_t> eos_ids;
    std::vector<std::string> profiles;    ///< the calibrated ones that count for what runs; stale ones are left out
    bool has_text = false;                ///< whether prompts may be text
    std::optional<std::int64_t> max_rows; ///< most sequences of one forward: those that an engine was built for; nothing for no limit
};

/// A bundle opened on a device. Any number of threads may use one: each call owns its rows and their KV memory.
class MARS_API Session {
  public:
    struct Options {
        /// An execution provider's name, and a GPU's number behind a colon ("cuda:1", of those that CUDA_VISIBLE_DEVICES shows); one that
        /// is missing is an error, never another.
        std::string device = "cpu";
        std::optional<int> threads = {};         ///< compute threads; the backend's choice by default
        std::optional<std::string> variant = {}; ///< the first that runs here by default
        Verify verify = Verify::once;            ///< whether files are hashed
        /// Memory for KV entries of what was read before; 0 keeps nothing. By default a sixteenth of what is free, at most 1 GiB.
        std::optional<std::int64_t> cache_bytes = std::nullopt;
        /// For a bundle that may be anybody's: all is hashed and nothing remembered, engines are left alone, sizes are limited.
        bool safe = false;
        /// Whether the text of a special token, such as <|im_end|>, is that token inside messages, too. By default it is plain text there, so
        /// that nobody who writes a message can end a turn; in prompts that are one text it is always the token.
        bool parse_special = false;
        /// Of ONNX Runtime, by its own names: with a dot a session's ({"session.intra_op.allow_spinning", "0"}), without one the execution
        /// provider's ({"device_id", "1"}). An engine takes none.
        std::map<std::string, std::string> options = {};
        /// Whether it is an error, not a warning, that a GPU's provider leaves operators on hidden states to the CPU.
        bool strict = false;
        /// A cudaStream_t on which steps run on CUDA, such as the one that a robot's perception uses. It outlives the session, and nobody
        /// else puts work on it during a step. By default an engine has a stream of its own with this priority (cudaDeviceGetStreamPriorityRange).
        void* cuda_stream = nullptr;
        int cuda_priority = 0;
        /// Gets what was opened, and the log of ONNX Runtime or TensorRT. Silence by default.
        OnLog on_log = nullptr;
    };

    /// Open the bundle at `path`. Throws BundleError for a bad bundle, SessionError when no variant runs here.
    static Session open(const std::filesystem::path& path, const Options& options);
    static Session open(const std::filesystem::path& path) { return open(path, Options()); }

    /// Answer one prompt. Throws SessionError.
    Completion generate(const Prompt& prompt, const GenerationConfig& config = {}, const OnEvent& on_event = nullptr,
                        const Commit& commit = {}) const;

    /// Answer several prompts as rows of one batch, each with its own config. `on_event` returning true stops that row only.
    std::vector<Completion> generate_batch(const std::vector<Prompt>& prompts, const std::vector<GenerationConfig>& configs,
                                           const OnEvent& on_event = nullptr, const Commit& commit = {}) const;

    /// Answer one prompt step by step.
    Stream stream(const Prompt& prompt, const GenerationConfig& config = {}, const Commit& commit = {}) const;

    /// Talk in turns. `drop_oldest`: at the context's end the turns behind the system message go. Throws SessionError without a tokenizer.
    Conversation conversation(std::optional<std::string> system = std::nullopt, bool drop_oldest = false) const;

    /// See to it that what a step costs is known, so that no request waits for it: about a second, unless an earlier session of this user
    /// wrote it down.
    void warm_up() const;

    /// Take this for what a step costs, and measure nothing: the same windows in every run. `points`: positions of a step (rows x slots),
    /// rising, and the seconds it takes, both above 0. Throws SessionError for others.
    void set_cost(std::vector<std::pair<std::int64_t, double>> points) const;

    /// What the store of KV entries was asked, what it had, and what it holds.
    PrefixStats prefix_stats() const;

    /// Give the memory of the store of KV entries back.
    void forget_prefixes() const;

    /// Token ids of a prompt. Throws SessionError for an empty or too long one, or ids outside the vocabulary.
    std::vector<std::int64_t> encode(const Prompt& prompt) const;

    /// The text of token ids, special tokens left out. Throws SessionError for a bundle without a tokenizer.
    std::string decode(const std::vector<std::int64_t>& token_ids) const;

    /// Whether prompts may be text: the bundle has a tokenizer that this library reads. Others work with token ids.
    bool has_text() const;

    /// Throws SessionError for values out of range, and when this variant's graph lacks what `config` needs.
    void check(const GenerationConfig& config) const;

    /// A reader of token ids as they come. Throws SessionError for a bundle without a tokenizer.
    TextStream text_stream() const;

    /// What runs here, and what it runs.
    SessionInfo info() const;

    /// The settings that a calibrated profile of the bundle names: tau, its metric and the window. Throws SessionError for an unknown
    /// profile, and for a stale one: made for another graph, other weights or another precision.
    GenerationConfig config_of_profile(const std::string& name) const;

    /// Most tokens that a row can hold, prompt and answer together.
    std::int64_t max_capacity() const;

  private:
    friend class Batcher;
    friend struct Opened;
    explicit Session(std::shared_ptr<const Opened> opened) : opened_(std::move(opened)) {}

    std::shared_ptr<const Opened> opened_;
};

/// Events of one answer, made as they are asked for. Keeps its session's bundle open.
///
/// One thread at a time, but for tau, exact and cancel().
class MARS_API Stream {
  public:
    ~Stream();
    Stream(Stream&&) noexcept;
    Stream& operator=(Stream&&) noexcept;

    /// The next event; no value after the last one. Throws SessionError, after which the stream has ended.
    std::optional<Event> next();

    /// Any thread: the confidence bound, no value in exact mode. A new one counts from the next step on and ends exact mode. Throws
    /// SessionError for one out of range.
    std::optional<double> tau() const;
    void set_tau(double tau);

    /// Any thread: exact mode, at any time: what follows is the one-token continuation of what is there. Leaving it takes default_tau.
    bool exact() const { return !tau(); }
    void set_exact(bool exact);

    /// Any thread: end the answer now; on ONNX Runtime also in the middle of a step. Leaving a stream early costs nothing.
    void cancel();

    /// End the answer now, give its memory back, and let later prompts begin with what it has read and said.
    void close();

    /// Whether the answer has ended, and whether a step failed and ended it.
    bool is_over() const;
    bool failed() const;

    const Stats& stats() const;

    /// Prompt tokens that are in the cache.
    std::int64_t prefilled() const;

    /// The answer so far; `finish_reason` is cancelled while it is not finished.
    Completion completion() const;

  private:
    friend class Session;
    friend class Conversation;
    explicit Stream(std::unique_ptr<Answers> answers);

    std::unique_ptr<Answers> answers_;
};

} // namespace mars
