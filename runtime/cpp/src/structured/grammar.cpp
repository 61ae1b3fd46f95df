#include "structured/grammar.hpp"

#include <algorithm>

#include <mars/errors.hpp>

#include "decode/prefix.hpp"
#include "joined.hpp"

namespace mars {

namespace {

using Tokens = std::vector<std::int64_t>;

constexpr std::size_t max_forced = 256;                   // tokens forced at once; the rest follows in the next run
constexpr std::size_t max_forced_bytes = 16 * max_forced; // of a forced text whose continuations are tried
constexpr std::int64_t per_byte = 4;                      // tried continuations that begin with the same byte
constexpr std::size_t look_back = 4;                      // forced tokens at the end that a longer token may replace
constexpr std::size_t remembered = 4096;                  // cached results of each kind, and
constexpr std::int64_t most_mask_bytes = 8 << 20;         // of an automaton's masks
constexpr std::size_t most_open = 16;                     // automata
constexpr std::int64_t max_certain = 4096;                // tokens: a longer forced text counts as a choice
constexpr const char* simpler = "; make the schema, regex or tools simpler";

} // namespace

Tokens Matcher::forced() {
    if (!forced_) forced_ = walk_->forced(state_, last_);
    return forced_->tokens;
}

TokenSet Matcher::mask() {
    if (!forced_ || forced_->only.empty()) return walk_->mask(state_);
    TokenSet only(walk_->vocabulary().size());
    for (const std::int64_t token : forced_->only) only.set(token);
    return only;
}

Walk::Likely Matcher::likely() {
    const Walk::Likely token = walk_->likely(state_);
    return token && mask().has(token->first) ? token : std::nullopt;
}

void Matcher::consume(std::int64_t token) {
    const std::string_view text = walk_->vocabulary().text(token);
    const std::int32_t state = text.empty() ? Automaton::none : walk_->automaton().walk(text, state_);
    if (state == Automaton::none) throw SessionError("the grammar does not allow token " + std::to_string(token) + " here");
    state_ = state;
    last_ = token;
    forced_.reset();
}

template <typename Key, typename Value, typename Compute>
Value Walk::cached(std::map<Key, Value>& values, const Key& key, const Compute& compute, std::size_t most) {
    {
        const std::lock_guard<std::mutex> guard(lock_);
        if (const auto known = values.find(key); known != values.end()) return known->second;
    }
    Value value = compute();
    const std::lock_guard<std::mutex> guard(lock_);
    if (values.size() >= most) values.clear();
    return values.insert_or_assign(key, std::move(value)).first->second;
}

std::size_t Walk::most_masks(std::int64_t vocab_size) {
    const std::int64_t fitting = most_mask_bytes / (vocab_size / 8 + 1);
    return static_cast<std::size_t>(std::clamp<std::int64_t>(fitting, 1, remembered));
}

TokenSet Walk::mask(std::int32_t state) {
    TokenSet allowed = cached(masks_, state, [&] { return compute_mask(state); }, most_masks(vocabulary_->size()));
    if (!automaton_.is_end(state) && !allowed.any())
        throw SessionError(std::string("nothing that is allowed so far can be continued under the grammar") + simpler);
    return allowed;
}

/// Follows all tokens in the order of their bytes, so that common beginnings are followed once.
TokenSet Walk::compute_mask(std::int32_t state) const {
    TokenSet allowed(vocabulary_->size());
    std::vector<std::int32_t> states(vocabulary_->longest + 1, Automaton::none); // after each byte of the previous token
    states[0] = state;
    std::size_t alive = 0; // leading bytes of it that are allowed
    for (std::size_t i = 0; i < vocabulary_->sorted.size(); ++i) {
        const std::size_t alike = vocabulary_->alike[i];
        if (alike > alive) continue; // it begins with bytes that are not allowed
        const std::string_view text = vocabulary_->text(vocabulary_->sorted[i]);
        for (alive = alike; alive < text.size(); ++alive) {
            states[alive + 1] = automaton_.step(states[alive], static_cast<unsigned char>(text[alive]));
            if (states[alive + 1] == Automaton::none) break;
        }
        if (alive == text.size()) allowed.set(vocabulary_->sorted[i]);
    }
    return allowed;
}

Walk::Forced Walk::forced(std::int32_t state, std::int64_t last) {
    if (!automaton_.only(state)) return {};
    return cached(forced_, std::pair(state, last), [&] { return compute_forced(state, last); }, remembered);
}

/// The forced bytes as tokens, as far as they are the same whatever follows.
///
/// With byte pairs, what follows may change the last tokens: `"}}` is written as `"` and `}}`, but before a comma as
/// `"}` and `},`. So the bytes are spelled with several continuations, and only the tokens that all spellings begin with
/// are forced. If even their first tokens differ, those are the only choices.
Walk::Forced Walk::compute_forced(std::int32_t state, std::int64_t last) {
    const auto [data, end] = forced_bytes(state);
    Tokens tokens = spell(data, end, last);
    if (tokens.empty()) return {};
    if (tokens.size() > max_forced) return {{tokens.begin(), tokens.begin() + max_forced}, {}};
    if (const std::size_t valid = num_valid(tokens, state); valid < tokens.size()) {
        // The name of a special token, such as <|mask|>, is plain text here: spell it by the longest tokens.
        tokens.resize(valid);
        for (const std::int64_t token : vocabulary_->beginnings(data))
            if (tokens.empty() && after({token}, state) != Automaton::none) tokens = {token};
        return {tokens, {}};
    }
    const std::optional<TokenSet> next = allowed_after(data, state);
    if (!next) return {tokens, {}};
    if (!next->any()) return {vocabulary_->write(data), {}}; // the answer ends here
    const Spellings spellings = spell_before(data, *next);
    const auto common = static_cast<std::size_t>(num_common(tokens, spellings.common));
    if (common > 0) {
        tokens.resize(common);
        return {tokens, {}};
    }
    Forced choice;
    for (const std::int64_t token : spellings.first)
        if (after({token}, state) != Automaton::none) choice.only.push_back(token);
    if (choice.only.empty()) choice.tokens = tokens;
    return choice;
}

/// The commonest first token of the spellings of a forced text, and its share.
Walk::Likely Walk::likely(std::int32_t state) {
    return cached(
        likely_, state,
        [&]() -> Likely {
            const std::string data = forced_bytes(state).first;
            const std::optional<TokenSet> next = data.empty() ? std::nullopt : allowed_after(data, state);
            if (!next || !next->any()) return std::nullopt;
            const Spellings spellings = spell_before(data, *next);
            if (spellings.first.empty()) return std::nullopt;
            return std::pair(spellings.first.front(), spellings.share);
        },
        remembered);
}

/// The bytes that must follow a state, and the state after them.
std::pair<std::string, std::int32_t> Walk::forced_bytes(std::int32_t state) const {
    std::string data;
    while (const std::optional<std::uint32_t> edge = automaton_.only(state)) {
        data += static_cast<char>(automaton_.low[*edge]);
        state = static_cast<std::int32_t>(automaton_.target[*edge]);
    }
    return {data, state};
}

/// The tokens allowed after the forced bytes `data`; no value if the bytes are too long or cannot be written.
std::optional<TokenSet> Walk::allowed_after(const std::string& data, std::int32_t state) {
    if (data.size() > max_forced_bytes) return std::nullopt;
    const std::int32_t end = after(vocabulary_->write(data), state);
    return end == Automaton::none ? std::nullopt : std::optional(mask(end));
}

/// `data` as tokens after the token `last`, without tokens at the end that a longer one may replace.
Tokens Walk::spell(const std::string& data, std::int32_t end, std::int64_t last) const {
    if (last >= 0) {
        const Tokens tokens = vocabulary_->write(std::string(vocabulary_->text(last)) + data);
        if (!tokens.empty() && tokens.front() == last) return without_open_end({tokens.begin() + 1, tokens.end()}, end);
    }
    return without_open_end(vocabulary_->write(data), end);
}

/// Drop the tokens at the end whose bytes may be the beginning of a longer token.
Tokens Walk::without_open_end(Tokens tokens, std::int32_t end) const {
    std::string tail;
    for (std::size_t i = tokens.size() - std::min(tokens.size(), look_back); i < tokens.size(); ++i) tail += vocabulary_->text(tokens[i]);
    if (tail.size() > vocabulary_->longest) tail.erase(0, tail.size() - vocabulary_->longest);
    for (std::size_t i = 0; i < tail.size(); ++i) {
        if (!has_extension(std::string_view(tail).substr(i), end)) continue;
        for (std::size_t length = 0; length < tail.size() - i; tokens.pop_back()) length += vocabulary_->text(tokens.back()).size();
        break;
    }
    return tokens;
}

/// Whether a longer token begins with `data` and continues with bytes allowed in the state `end`.
bool Walk::has_extension(std::string_view data, std::int32_t end) const {
    const auto& sorted = vocabulary_->sorted;
    auto at = std::lower_bound(sorted.begin(), sorted.end(), data,
                               [this](std::int64_t token, std::string_view text) { return vocabulary_->text(token) < text; });
    for (; at != sorted.end() && vocabulary_->text(*at).substr(0, data.size()) == data; ++at) {
        const std::string_view more = vocabulary_->text(*at).substr(data.size());
        if (!more.empty() && automaton_.walk(more, end) != Automaton::none) return true;
    }
    return false;
}

/// Spell `data` before the tokens `next`; of those with the same first byte, the shortest few are tried.
Walk::Spellings Walk::spell_before(const std::string& data, const TokenSet& next) const {
    Spellings spellings;
    std::map<std::int64_t, std::int64_t> counts; // by first token
    std::int64_t num = 0, num_alike = 0;
    int previous = -1;
    for (const std::int64_t token : vocabulary_->by_length) {
        if (!next.has(token)) continue;
        const std::string_view text = vocabulary_->text(token);
        const int byte = static_cast<unsigned char>(text.front());
        num_alike = byte == previous ? num_alike + 1 : 0;
        previous = byte;
        if (num_alike >= per_byte) continue;
        const Tokens spelling = vocabulary_->write(data + std::string(text));
        if (spelling.empty()) continue;
        if (num++ == 0) spellings.common = spelling;
        spellings.common.resize(static_cast<std::size_t>(num_common(spellings.common, spelling)));
        ++counts[spelling.front()];
    }
    for (const auto& [token, count] : counts) spellings.first.push_back(token);
    std::stable_sort(spellings.first.begin(), spellings.first.end(),
                     [&](std::int64_t a, std::int64_t b) { return counts.at(a) > counts.at(b); });
    if (num > 0) spellings.share = static_cast<double>(counts.at(spellings.first.front())) / static_cast<double>(num);
    return spellings;
}

/// The state after tokens, or none.
std::int32_t Walk::after(const Tokens& tokens, std::int32_t state) const {
    for (const std::int64_t token : tokens) {
        const std::string_view text = vocabulary_->text(token);
        state = text.empty() ? Automaton::none : automaton_.walk(text, state);
        if (state == Automaton::none) return state;
    }
    return state;
}

/// How many leading tokens are allowed.
std::size_t Walk::num_valid(const Tokens& tokens, std::int32_t state) const {
    std::size_t count = 0;
    while (count < tokens.size() && (state = after({tokens[count]}, state)) != Automaton::none) ++count;
    return count;
}

Matcher Grammars::matcher(const Bundle& bundle, const Tokenizer& tokenizer, const std::string& name) {
    const auto& grammars = bundle.manifest.grammars;
    const auto grammar = std::find_if(grammars.begin(), grammars.end(), [&](const StoredGrammar& each) { return each.name == name; });
    if (grammar == grammars.end())
        throw SessionError(bundle.path.string() + ": no grammar `" + name.substr(0, 60) +
                               "` (there are: " + (grammars.empty() ? "none" : joined(grammars, ", ", &StoredGrammar::name)) +
                               "); `mars-export grammar` makes one",
                           "invalid_grammar", "grammar");
    const std::lock_guard<std::mutex> guard(lock_);
    auto walk = walks_.find(grammar->file);
    if (walk == walks_.end()) {
        Automaton automaton = read_automaton(bundle, grammar->file);
        if (!vocabulary_) vocabulary_ = std::make_shared<Vocabulary>(tokenizer, bundle.manifest.model.vocab_size);
        if (walks_.size() >= most_open) walks_.clear();
        walk = walks_.emplace(grammar->file, std::make_shared<Walk>(std::move(automaton), vocabulary_)).first;
    }
    return Matcher(walk->second);
}

bool leaves_a_choice(Matcher matcher) {
    std::int64_t left = max_certain;
    while (left > 0) {
        const Tokens forced = matcher.forced();
        if (forced.empty()) break;
        left -= static_cast<std::int64_t>(forced.size());
        for (const std::int64_t token : forced) matcher.consume(token);
    }
    return left <= 0 || !matcher.is_over();
}

} // namespace mars
