// Encoding: added tokens first, then normalization, words, merges.
#include "text/tokenizer.hpp"

#include <algorithm>
#include <utility>

#include <mars/errors.hpp>

#include "text/tokenizer_state.hpp"
#include "text/unicode.hpp"
#include "text/utf8.hpp"

namespace mars {

namespace {

constexpr std::size_t max_text = std::size_t{1} << 30; // bytes; positions in a word have 32 bits

/// Encodes one text. Owns the memory that its pieces share.
class Encoder {
  public:
    Encoder(const Tokenizer::State& state, std::vector<std::int64_t>& ids, bool is_within = false)
        : state_(state), metaspace_(state.metaspace), ids_(ids) {
        if (is_within && metaspace_) metaspace_->prefix = Metaspace::Prefix::never;
    }

    /// Added tokens become their ids, except for control tokens inside `plain`; the text between them is normalized.
    void encode(std::string_view text, const Spans& plain = {}) {
        each_part(state_.verbatim, text, plain, [&](std::string_view part) {
            const std::optional<std::string> changed = normalized(part);
            const auto start = static_cast<std::size_t>(part.data() - text.data());
            const Spans inside = state_.normalized.empty() ? Spans() : moved(plain, start, part);
            each_part(state_.normalized, changed ? *changed : part, inside,
                      [&](std::string_view each) { words(each, each.data() == text.data()); });
        });
    }

  private:
    template <typename Between>
    void each_part(const AddedTokens& added, std::string_view text, const Spans& plain, Between between) {
        for (std::size_t from = 0, at = 0; from < text.size();) {
            const AddedTokens::Match match = added.find(text, at);
            at = match.start + match.length;
            if (match.length != 0 && is_text(match, plain)) continue;
            if (match.start != from) between(text.substr(from, match.start - from));
            if (match.length != 0) ids_.push_back(match.id);
            from = at;
        }
    }

    bool is_text(const AddedTokens::Match& match, const Spans& plain) const {
        if (!state_.tokens[static_cast<std::size_t>(match.id)].is_control) return false;
        const auto span = std::partition_point(plain.begin(), plain.end(), [&](const auto& each) { return each.second <= match.start; });
        return span != plain.end() && span->first < match.start + match.length;
    }

    /// The positions of `spans` in the normalized `part`. If characters compose across an edge, the result is a few
    /// bytes off.
    Spans moved(const Spans& spans, std::size_t start, std::string_view part) const {
        Spans result;
        std::size_t from = 0, to = 0;
        const auto moved_edge = [&](std::size_t edge) {
            edge = std::clamp(edge, start, start + part.size()) - start;
            const std::optional<std::string> changed = normalized(part.substr(from, edge - from), from > 0);
            to += changed ? changed->size() : edge - from;
            from = edge;
            return to;
        };
        for (const auto& [begin, end] : spans) {
            if (end <= start || begin >= start + part.size()) continue;
            const std::size_t first = moved_edge(begin);
            result.emplace_back(first, moved_edge(end));
        }
        return result;
    }

    /// `goes_on`: no mark is added in front.
    std::optional<std::string> normalized(std::string_view text, bool goes_on = false) const {
        if (state_.nfc) return to_nfc(text);
        if (!metaspace_ || !metaspace_->by_normalizer) return std::nullopt;
        Metaspace metaspace = *metaspace_;
        if (goes_on) metaspace.prefix = Metaspace::Prefix::never;
        return metaspace.written(text, false);
    }

    void words(std::string_view text, bool is_first) {
        std::string written;
        if (metaspace_) {
            const bool is_done = metaspace_->by_normalizer;
            if (!is_done) text = written = metaspace_->written(text, is_first);
            pieces_.clear();
            metaspace_->cut(text, pieces_);
        } else {
            pieces_.assign(1, text);
        }
        for (const Split split : state_.splits) {
            finer_.clear();
            for (const std::string_view piece : pieces_) cut(split, piece, finer_);
            std::swap(pieces_, finer_);
        }
        for (const std::string_view word : pieces_) state_.bpe.encode(word, scratch_, ids_);
    }

    const Tokenizer::State& state_;
    std::optional<Metaspace> metaspace_;
    std::vector<std::int64_t>& ids_;
    std::vector<std::string_view> pieces_, finer_;
    Bpe::Scratch scratch_;
};

} // namespace

AddedTokens::AddedTokens(std::vector<std::pair<std::string, std::int64_t>> tokens) : tokens_(std::move(tokens)) {
    std::sort(tokens_.begin(), tokens_.end());
    for (const auto& [text, id] : tokens_) starts_[static_cast<unsigned char>(text[0])] = true;
}

AddedTokens::Match AddedTokens::find(std::string_view text, std::size_t from) const {
    for (std::size_t start = from; start < text.size(); ++start) {
        if (!starts_[static_cast<unsigned char>(text[start])]) continue;
        if (const Match match = longest(text, start); match.length != 0) return match;
    }
    return {text.size(), 0, 0};
}

AddedTokens::Match AddedTokens::longest(std::string_view text, std::size_t start) const {
    Match match{start, 0, 0};
    auto low = tokens_.begin(), high = tokens_.end();
    for (std::size_t depth = 0; start + depth < text.size() && low != high; ++depth) {
        // All of [low, high) share their first `depth` bytes; a token that ends here sorts before longer ones.
        const auto byte = static_cast<unsigned char>(text[start + depth]);
        const auto at = [depth](const auto& token) {
            return token.first.size() <= depth ? -1 : static_cast<unsigned char>(token.first[depth]);
        };
        low = std::partition_point(low, high, [&](const auto& token) { return at(token) < byte; });
        high = std::partition_point(low, high, [&](const auto& token) { return at(token) <= byte; });
        if (low != high && low->first.size() == depth + 1) match = {start, depth + 1, low->second};
    }
    return match;
}

Tokenizer::Tokenizer(std::shared_ptr<const State> state) : state_(std::move(state)) {}

std::vector<std::int64_t> Tokenizer::encode(std::string_view text, bool add_special_tokens, const Spans& plain) const {
    if (const std::size_t good = utf8::valid_prefix(text); good != text.size())
        throw SessionError("the text is not valid UTF-8 at byte " + std::to_string(good) + "; pass UTF-8");
    if (text.size() > max_text) throw SessionError("the text has more than " + std::to_string(max_text) + " bytes; shorten it");
    std::vector<std::int64_t> ids;
    if (add_special_tokens) ids = state_->before;
    Encoder(*state_, ids).encode(text, plain);
    if (add_special_tokens) ids.insert(ids.end(), state_->after.begin(), state_->after.end());
    return ids;
}

std::vector<std::int64_t> Tokenizer::encode_within(std::string_view text) const {
    std::vector<std::int64_t> ids;
    if (utf8::is_valid(text) && text.size() <= max_text) Encoder(*state_, ids, true).encode(text);
    return ids;
}

std::string Tokenizer::decode(const std::vector<std::int64_t>& ids, bool skip_special_tokens, bool is_start) const {
    if (state_->metaspace) return joined(ids, skip_special_tokens, is_start);
    std::string bytes;
    for (const std::int64_t id : ids) bytes += bytes_of(id, skip_special_tokens);
    return utf8::is_valid(bytes) ? bytes : utf8::lossy(bytes);
}

std::string Tokenizer::joined(const std::vector<std::int64_t>& ids, bool skip_special_tokens, bool is_start) const {
    std::string text, run; // fallback bytes: all of them form characters, or none does
    const auto end_run = [&] {
        if (utf8::is_valid(run))
            text += run;
        else
            for (std::size_t i = 0; i < run.size(); ++i) utf8::append(text, utf8::replacement);
        run.clear();
    };
    for (const std::int64_t id : ids) {
        const std::string_view bytes = bytes_of(id, skip_special_tokens);
        if (bytes.empty()) continue;
        if (state_->tokens[static_cast<std::size_t>(id)].is_byte) {
            run += bytes;
        } else {
            end_run();
            text += bytes;
        }
    }
    end_run();
    if (is_start && state_->metaspace->leaves_first_space && !text.empty() && text.front() == ' ') text.erase(0, 1);
    return text;
}

std::string_view Tokenizer::bytes_of(std::int64_t id, bool skip_special_tokens) const {
    if (id < 0 || static_cast<std::size_t>(id) >= state_->tokens.size()) return {};
    const State::Token& token = state_->tokens[static_cast<std::size_t>(id)];
    return token.is_special && skip_special_tokens ? std::string_view() : token.bytes;
}

std::size_t Tokenizer::size() const { return state_->tokens.size(); }

} // namespace mars
