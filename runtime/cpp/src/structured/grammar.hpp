// runtime/structured/grammar.py: grammars of a bundle over its tokens: allowed and forced ones, and their spelling.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bundle/bundle.hpp"
#include "decode/token_set.hpp"
#include "structured/automaton.hpp"
#include "structured/vocabulary.hpp"
#include "text/tokenizer.hpp"

namespace mars {

/// An automaton over one vocabulary, with what was computed for it. Shared by the answers that follow it; thread-safe.
class Walk {
  public:
    /// The forced continuation of a state: tokens, or if the same text can be written in several ways, its possible first tokens.
    struct Forced {
        std::vector<std::int64_t> tokens, only;
    };
    using Likely = std::optional<std::pair<std::int64_t, double>>;

    Walk(Automaton automaton, std::shared_ptr<const Vocabulary> vocabulary)
        : automaton_(std::move(automaton)), vocabulary_(std::move(vocabulary)) {}

    const Automaton& automaton() const { return automaton_; }
    const Vocabulary& vocabulary() const { return *vocabulary_; }

    /// The tokens that may follow a state. Throws SessionError if there are none and the answer may not end.
    TokenSet mask(std::int32_t state);

    /// The forced continuation of a state that was reached by the token `last` (-1 for none).
    Forced forced(std::int32_t state, std::int64_t last);

    /// A likely token if no token is forced, and how likely it is.
    Likely likely(std::int32_t state);

    /// Masks that are cached for a vocabulary, in at most 8 MiB.
    static std::size_t most_masks(std::int64_t vocab_size);

  private:
    /// Several spellings of a text: the tokens that all begin with; their first tokens, commonest first, and the share
    /// of the commonest.
    struct Spellings {
        std::vector<std::int64_t> common, first;
        double share = 0.0;
    };

    template <typename Key, typename Value, typename Compute>
    Value cached(std::map<Key, Value>& values, const Key& key, const Compute& compute, std::size_t most);
    TokenSet compute_mask(std::int32_t state) const;
    Forced compute_forced(std::int32_t state, std::int64_t last);
    std::pair<std::string, std::int32_t> forced_bytes(std::int32_t state) const;
    std::optional<TokenSet> allowed_after(const std::string& data, std::int32_t state);
    std::vector<std::int64_t> spell(const std::string& data, std::int32_t end, std::int64_t last) const;
    std::vector<std::int64_t> without_open_end(std::vector<std::int64_t> tokens, std::int32_t end) const;
    bool has_extension(std::string_view data, std::int32_t end) const;
    Spellings spell_before(const std::string& data, const TokenSet& next) const;
    std::int32_t after(const std::vector<std::int64_t>& tokens, std::int32_t state) const;
    std::size_t num_valid(const std::vector<std::int64_t>& tokens, std::int32_t state) const;

    Automaton automaton_;
    std::shared_ptr<const Vocabulary> vocabulary_;
    std::mutex lock_;
    std::map<std::int32_t, TokenSet> masks_;
    std::map<std::pair<std::int32_t, std::int64_t>, Forced> forced_;
    std::map<std::int32_t, Likely> likely_;
};

/// A grammar's state for one answer so far. It has no end-of-sequence token: the end is a state. A copy tries out a
/// continuation.
class Matcher {
  public:
    explicit Matcher(std::shared_ptr<Walk> walk) : walk_(std::move(walk)) {}

    /// The tokens that must follow, as the tokenizer writes them; empty if there is a choice.
    std::vector<std::int64_t> forced();

    /// The tokens that may follow if nothing is forced. Throws SessionError if there are none.
    TokenSet mask();

    /// If nothing is forced: a token that is likely anyway, and how likely; or no value.
    Walk::Likely likely();

    /// Continue with a token that may follow. Throws SessionError for any other.
    void consume(std::int64_t token);

    /// Whether the answer may end here, and whether only the end may follow.
    bool may_end() const { return walk_->automaton().is_end(state_); }
    bool is_over() const { return may_end() && !walk_->mask(state_).any(); }

  private:
    std::shared_ptr<Walk> walk_;
    std::int32_t state_ = 0;
    std::int64_t last_ = -1;
    std::optional<Walk::Forced> forced_;
};

/// The grammars of one bundle, each read at first use. Thread-safe.
class Grammars {
  public:
    /// A matcher at the beginning of an answer. Throws SessionError for an unknown name, BundleError for a bad file.
    Matcher matcher(const Bundle& bundle, const Tokenizer& tokenizer, const std::string& name);

  private:
    std::mutex lock_;
    std::shared_ptr<const Vocabulary> vocabulary_;
    std::map<std::string, std::shared_ptr<Walk>> walks_;
};

/// Whether more than one text satisfies the grammar.
bool leaves_a_choice(Matcher matcher);

} // namespace mars
