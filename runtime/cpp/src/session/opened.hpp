// runtime/session/session.py: an opened bundle as its sessions and streams share it.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <mars/errors.hpp>
#include <mars/session.hpp>

#include "bundle/bundle.hpp"
#include "decode/prefix.hpp"
#include "decode/schedule.hpp"
#include "decode/sequence.hpp"
#include "structured/grammar_state.hpp"
#include "text/text.hpp"

namespace mars {

/// How many tokens of a prompt come from its system message, by system message. Thread-safe.
class Openings {
  public:
    /// How many of `ids` belong to the system message.
    std::int64_t length(const Text& text, const std::string& system, const Ids& ids);

  private:
    std::mutex mutex_;
    std::map<std::string, Ids> known_;
};

/// A sequence, and the text stream that its stop condition feeds (null for a bundle without a tokenizer).
struct NewSequence {
    std::unique_ptr<TextStream> text;
    std::unique_ptr<Sequence> seq;
};

/// The opened bundle, shared by a session and its streams. Immutable, except for members that lock themselves.
struct Opened {
    Bundle bundle;
    std::unique_ptr<Backend> backend;
    std::optional<Text> text;
    std::string variant;      // name of the running variant
    std::string device;       // such as "cuda:1"; empty for a custom backend
    std::string text_problem; // why `text` is empty although the bundle has a tokenizer
    std::int64_t prefill_tokens = Session::Options().prefill_tokens;
    std::unique_ptr<LearnedCost> learned_cost = std::make_unique<LearnedCost>(built_in_cost("float32", true));
    std::unique_ptr<Openings> openings = std::make_unique<Openings>();
    std::unique_ptr<Grammars> grammars = std::make_unique<Grammars>(); // guards itself
    std::unique_ptr<PrefixCache> prefixes = std::make_unique<PrefixCache>(0, std::nullopt);
    std::shared_ptr<AcceptanceRates> acceptance_rates = std::make_shared<AcceptanceRates>(); // guards itself

    /// A session on any backend, such as a fake one; `bundle.path` need not exist.
    static Session over(Bundle bundle, std::unique_ptr<Backend> backend, std::optional<Text> text = std::nullopt,
                        std::int64_t cache_bytes = 0);

    const Variant& runs() const { return bundle.variant(variant); }

    /// A decoding loop of its own, for one thread. It must not outlive this.
    Schedule schedule(const Limits& limits, const std::optional<KvBudget>& budget = std::nullopt) const {
        if (bundle.manifest.model.recurrent && limits.cache_block > 1)
            throw SessionError("a model with recurrent layers supports cursor commit only; leave out cache_block");
        return Schedule(*backend, bundle.manifest.block, bundle.manifest.mask_id(), limits, StepPlanner(*learned_cost), budget);
    }
    GrammarState new_grammar_state(const GenerationConfig& config) const;

    /// A sequence's access to the prefix cache, or null. `system` is the system message if `prompt` does not contain it.
    std::shared_ptr<PrefixHandle> new_prefix_handle(const Prompt& prompt, const Ids& ids, const std::string& salt,
                                                    const std::optional<std::string>& system) const;

    const Text& needs_text() const;

    /// Throws SessionError for a text that is longer than `most` tokens, or the context, can be: tokenizing it would take long.
    void measure(std::int64_t characters, std::optional<std::int64_t> most = std::nullopt) const;

    /// A splitter of the answer to a prompt of messages; no value if the chat template marks no thinking.
    std::optional<ThinkingStream> thinking_stream(const Prompt& prompt) const;

    /// Token ids of a prompt that may have at most `most` tokens and must fit the context.
    std::vector<std::int64_t> encode(const Prompt& prompt, std::optional<std::int64_t> most = std::nullopt) const;

    /// A sequence for a prompt of at most `most` tokens, with its text stream. `began`: when the request's clock started.
    /// Throws SessionError as encode and check do.
    NewSequence new_sequence(std::int64_t index, const Prompt& prompt, const GenerationConfig& config,
                             std::chrono::steady_clock::time_point began, const std::optional<std::string>& system = std::nullopt,
                             std::optional<std::int64_t> most = std::nullopt) const;

    /// Throws SessionError for values out of range, and if this variant's graph lacks what `config` needs.
    void check(const GenerationConfig& config) const;
};

} // namespace mars
