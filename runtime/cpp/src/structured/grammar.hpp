// Grammars of a bundle at work: automata over bytes, asked in tokens. The rule of runtime/structured/grammar.py: what is forced, and how it is
// written.
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
#include "structured/automaton.hpp"
#include "structured/guide.hpp"
#include "structured/vocabulary.hpp"
#include "text/tokenizer.hpp"

namespace mars {

/// An automaton over one vocabulary, with what was computed for it. Shared by the answers that follow it; thread-safe.
class Walk : public std::enable_shared_from_this<Walk> {
  public:
    /// What must follow: tokens, or where the same text can be written in several ways, the tokens that it may begin with.
    struct Forced {
        std::vector<std::int64_t> tokens, only;
    };
    using Likely = std::optional<std::pair<std::int64_t, double>>;

    Walk(Automaton automaton, std::shared_ptr<const Vocabulary> vocabulary)
        : automaton_(std::move(automaton)), vocabulary_(std::move(vocabulary)) {}

    /// A matcher at the beginning of an answer.
    std::unique_ptr<Matcher> matcher();

    const Automaton& automaton() const { return automaton_; }
    const Vocabulary& vocabulary() const { return *vocabulary_; }

    /// The tokens that may follow a state.
    TokenSet mask(std::int32_t state);

    /// What must follow a state to which the token `last` led, -1 for none.
    Forced forced(std::int32_t state, std::int64_t last);

    /// A token that is likely where nothing is forced.
    Likely likely(std::int32_t state);

  private:
    /// Some writings of a text: the tokens that all begin with, and the first tokens, the commonest first; the share of the commonest.
    struct Ways {
        std::vector<std::int64_t> common, first;
        double share = 0.0;
    };

    std::string forced_bytes(std::int32_t& state) const;
    std::vector<std::int64_t> written(const std::string& data, std::int32_t end, std::int64_t last) const;
    std::vector<std::int64_t> chopped(std::vector<std::int64_t> tokens, std::int32_t end) const;
    bool has_extension(std::string_view data, std::int32_t end) const;
    Forced settled(std::int32_t state, std::int64_t last);
    Ways ways(const std::string& data, const TokenSet& behind) const;
    std::int32_t behind(const std::vector<std::int64_t>& tokens, std::int32_t state) const;
    std::size_t num_valid(const std::vector<std::int64_t>& tokens, std::int32_t state) const;
    TokenSet found_mask(std::int32_t state) const;

    Automaton automaton_;
    std::shared_ptr<const Vocabulary> vocabulary_;
    std::mutex lock_;
    std::map<std::int32_t, TokenSet> masks_;
    std::map<std::pair<std::int32_t, std::int64_t>, Forced> forced_;
    std::map<std::int32_t, Likely> likely_;
};

/// The grammars of one bundle, each read when it is first asked for. Any thread.
class Grammars {
  public:
    /// A matcher at the beginning of an answer. Throws SessionError for an unknown name, BundleError for a bad file.
    std::unique_ptr<Matcher> matcher(const Bundle& bundle, const Tokenizer& tokenizer, const std::string& name);

  private:
    std::mutex lock_;
    std::shared_ptr<const Vocabulary> vocabulary_;
    std::map<std::string, std::shared_ptr<Walk>> walks_;
};

/// Whether anything but one text satisfies the grammar.
bool leaves_a_choice(const Matcher& matcher);

} // namespace mars
