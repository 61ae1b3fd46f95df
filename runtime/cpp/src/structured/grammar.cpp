// Masks by walking the tokens in the order of their bytes; forced tokens by writing what must follow in front of what may.
#include "structured/grammar.hpp"

#include <algorithm>

#include <mars/errors.hpp>

namespace mars {

namespace {

constexpr std::size_t most_settled = 256;   // tokens that are forced at once; more follow in the next run
constexpr std::int64_t per_byte = 4;        // continuations that begin with the same byte, of those that are tried
constexpr std::size_t look_back = 4;        // forced tokens at the end that a longer token may replace
constexpr std::size_t remembered = 4096;    // states whose masks are kept, and writings
constexpr std::size_t most_open = 16;       // automata
constexpr std::int64_t most_certain = 4096; // tokens: a longer text that is forced from end to end counts as a choice
constexpr const char* simpler = "; make the schema, regex or tools simpler";

std::size_t num_alike(const std::vector<std::int64_t>& one, const std::vector<std::int64_t>& other) {
    const auto end = one.begin() + static_cast<std::ptrdiff_t>(std::min(one.size(), other.size()));
    return static_cast<std::size_t>(std::mismatch(one.begin(), end, other.begin()).first - one.begin());
}

template <typename Key, typename Value>
const Value& remember(std::map<Key, Value>& known, const Key& key, Value value) {
    if (known.size() >= remembered) known.clear();
    return known.insert_or_assign(key, std::move(value)).first->second;
}

/// One answer's state in an automaton.
class Walker : public Matcher {
  public:
    explicit Walker(std::shared_ptr<Walk> walk, std::int32_t state = 0, std::int64_t last = -1)
        : walk_(std::move(walk)), state_(state), last_(last) {}

    std::vector<std::int64_t> forced() override {
        if (!forced_) forced_ = walk_->forced(state_, last_);
        return forced_->tokens;
    }

    TokenSet mask() override {
        if (forced_ && !forced_->only.empty()) {
            TokenSet only(walk_->vocabulary().size());
            for (const std::int64_t token : forced_->only) only.set(token);
            return only;
        }
        return walk_->mask(state_);
    }

    Walk::Likely likely() override {
        const Walk::Likely found = walk_->likely(state_);
        return found && mask().has(found->first) ? found : std::nullopt;
    }

    void consume(std::int64_t token) override {
        const std::string_view text = walk_->vocabulary().text(token);
        const std::int32_t state = text.empty() ? Automaton::none : walk_->automaton().walk(text, state_);
        if (state == Automaton::none) throw SessionError("the grammar does not allow token " + std::to_string(token) + " here");
        state_ = state;
        last_ = token;
        forced_.reset();
    }

    std::unique_ptr<Matcher> copy() const override { return std::make_unique<Walker>(walk_, state_, last_); }

    bool may_end() override { return walk_->automaton().is_end(state_); }
    bool is_over() override { return may_end() && !walk_->mask(state_).any(); }

  private:
    std::shared_ptr<Walk> walk_;
    std::int32_t state_;
    std::int64_t last_;
    std::optional<Walk::Forced> forced_;
};

} // namespace

std::unique_ptr<Matcher> Walk::matcher() { return std::make_unique<Walker>(shared_from_this()); }

TokenSet Walk::mask(std::int32_t state) {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto known = masks_.find(state);
    const TokenSet& found = known != masks_.end() ? known->second : remember(masks_, state, found_mask(state));
    if (!automaton_.is_end(state) && !found.any())
        throw SessionError(std::string("nothing that is allowed so far can be continued under the grammar") + simpler);
    return found;
}

TokenSet Walk::found_mask(std::int32_t state) const {
    TokenSet allowed(vocabulary_->size());
    std::vector<std::int32_t> states(vocabulary_->longest + 1, Automaton::none); // behind each byte of the token before
    states[0] = state;
    std::size_t alive = 0; // bytes of it that may follow
    for (std::size_t i = 0; i < vocabulary_->sorted.size(); ++i) {
        const std::size_t alike = vocabulary_->alike[i];
        if (alike > alive) continue; // it begins with what may not follow
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
    const std::pair<std::int32_t, std::int64_t> key(state, last);
    {
        const std::lock_guard<std::mutex> guard(lock_);
        if (const auto known = forced_.find(key); known != forced_.end()) return known->second;
    }
    Forced found = settled(state, last);
    const std::lock_guard<std::mutex> guard(lock_);
    return remember(forced_, key, std::move(found));
}

Walk::Likely Walk::likely(std::int32_t state) {
    {
        const std::lock_guard<std::mutex> guard(lock_);
        if (const auto known = likely_.find(state); known != likely_.end()) return known->second;
    }
    Likely found;
    std::int32_t end = state;
    const std::string data = forced_bytes(end);
    if (!data.empty() && data.size() <= 16 * most_settled) {
        const std::int32_t after = behind(vocabulary_->write(data), state);
        if (after != Automaton::none) {
            const TokenSet follows = mask(after);
            if (follows.any()) {
                const Ways found_ways = ways(data, follows);
                if (!found_ways.first.empty()) found = {found_ways.first.front(), found_ways.share};
            }
        }
    }
    const std::lock_guard<std::mutex> guard(lock_);
    return remember(likely_, state, found);
}

/// The bytes that must follow, and the state behind them.
std::string Walk::forced_bytes(std::int32_t& state) const {
    std::string data;
    while (const std::optional<std::uint32_t> edge = automaton_.only(state)) {
        data += static_cast<char>(automaton_.low[*edge]);
        state = static_cast<std::int32_t>(automaton_.target[*edge]);
    }
    return data;
}

/// The forced bytes as tokens, as they stand behind the last one, without those at the end that a longer token may replace.
std::vector<std::int64_t> Walk::written(const std::string& data, std::int32_t end, std::int64_t last) const {
    if (last >= 0) {
        std::vector<std::int64_t> tokens = vocabulary_->write(std::string(vocabulary_->text(last)) + data);
        if (!tokens.empty() && tokens.front() == last) return chopped({tokens.begin() + 1, tokens.end()}, end);
    }
    return chopped(vocabulary_->write(data), end);
}

std::vector<std::int64_t> Walk::chopped(std::vector<std::int64_t> tokens, std::int32_t end) const {
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

/// Whether a longer token begins with `data`, and may go on as it does.
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

/// The forced tokens that stay as they are whatever follows; the mask knows the others.
///
/// With byte pairs what follows may move the ends of tokens before: `"}}` is written as `"` and `}}`, but before a comma as `"}` and `},`.
Walk::Forced Walk::settled(std::int32_t state, std::int64_t last) {
    std::int32_t end = state;
    const std::string data = forced_bytes(end);
    std::vector<std::int64_t> forced = written(data, end, last);
    if (forced.empty()) return {};
    if (forced.size() > most_settled) return {{forced.begin(), forced.begin() + most_settled}, {}};
    if (const std::size_t valid = num_valid(forced, state); valid < forced.size()) {
        // The name of a special token, such as <|mask|>, is text here: spelled by the longest tokens.
        forced.resize(valid);
        for (const std::int64_t token : vocabulary_->beginnings(data))
            if (forced.empty() && behind({token}, state) != Automaton::none) forced = {token};
        return {forced, {}};
    }
    if (data.size() > 16 * most_settled) return {forced, {}};
    std::vector<std::int64_t> plain = vocabulary_->write(data);
    const std::int32_t after = behind(plain, state);
    if (after == Automaton::none) return {forced, {}};
    const TokenSet follows = mask(after);
    if (!follows.any()) return {std::move(plain), {}}; // the end
    const Ways found = ways(data, follows);
    const std::size_t alike = num_alike(forced, found.common);
    if (alike == 0) {
        Forced begun;
        for (const std::int64_t token : found.first)
            if (behind({token}, state) != Automaton::none) begun.only.push_back(token);
        if (begun.only.empty()) begun.tokens = std::move(forced);
        return begun;
    }
    forced.resize(alike);
    return {std::move(forced), {}};
}

/// How `data` is written before tokens of `behind`: a few of each first byte are tried.
Walk::Ways Walk::ways(const std::string& data, const TokenSet& behind) const {
    Ways found;
    std::map<std::int64_t, std::int64_t> counts;
    std::int64_t num = 0, same = 0;
    int begins = -1;
    for (const std::int64_t token : vocabulary_->by_length) {
        if (!behind.has(token)) continue;
        const std::string_view text = vocabulary_->text(token);
        const int first = static_cast<unsigned char>(text.front());
        same = first == begins ? same + 1 : 0;
        begins = first;
        if (same >= per_byte) continue;
        const std::vector<std::int64_t> variant = vocabulary_->write(data + std::string(text));
        if (variant.empty()) continue;
        if (num++ == 0) found.common = variant;
        found.common.resize(num_alike(found.common, variant));
        ++counts[variant.front()];
    }
    for (const auto& [token, count] : counts) found.first.push_back(token);
    std::stable_sort(found.first.begin(), found.first.end(), [&](std::int64_t a, std::int64_t b) { return counts.at(a) > counts.at(b); });
    if (num > 0) found.share = static_cast<double>(counts.at(found.first.front())) / static_cast<double>(num);
    return found;
}

/// The state behind tokens, or none.
std::int32_t Walk::behind(const std::vector<std::int64_t>& tokens, std::int32_t state) const {
    for (const std::int64_t token : tokens) {
        const std::string_view text = vocabulary_->text(token);
        state = text.empty() ? Automaton::none : automaton_.walk(text, state);
        if (state == Automaton::none) return state;
    }
    return state;
}

std::size_t Walk::num_valid(const std::vector<std::int64_t>& tokens, std::int32_t state) const {
    std::size_t count = 0;
    for (; count < tokens.size(); ++count)
        if ((state = behind({tokens[count]}, state)) == Automaton::none) break;
    return count;
}

std::unique_ptr<Matcher> Grammars::matcher(const Bundle& bundle, const Tokenizer& tokenizer, const std::string& name) {
    const auto& grammars = bundle.manifest.grammars;
    const auto found = std::find_if(grammars.begin(), grammars.end(), [&](const StoredGrammar& each) { return each.name == name; });
    if (found == grammars.end()) {
        std::string known;
        for (const StoredGrammar& each : grammars) known += (known.empty() ? "" : ", ") + each.name;
        throw SessionError(bundle.path.string() + ": no grammar `" + name.substr(0, 60) +
                           "` (there are: " + (known.empty() ? "none" : known) + "); `mars-export grammar` makes one");
    }
    const std::lock_guard<std::mutex> guard(lock_);
    auto walk = walks_.find(found->file);
    if (walk == walks_.end()) {
        Automaton automaton = read_automaton(bundle, found->file);
        if (!vocabulary_) vocabulary_ = std::make_shared<Vocabulary>(tokenizer, bundle.manifest.model.vocab_size);
        if (walks_.size() >= most_open) walks_.clear();
        walk = walks_.emplace(found->file, std::make_shared<Walk>(std::move(automaton), vocabulary_)).first;
    }
    return walk->second->matcher();
}

bool leaves_a_choice(const Matcher& matcher) {
    const std::unique_ptr<Matcher> probe = matcher.copy();
    std::int64_t left = most_certain;
    while (left > 0) {
        const std::vector<std::int64_t> forced = probe->forced();
        if (forced.empty()) break;
        left -= static_cast<std::int64_t>(forced.size());
        for (const std::int64_t token : forced) probe->consume(token);
    }
    return left <= 0 || !probe->is_over();
}

} // namespace mars
