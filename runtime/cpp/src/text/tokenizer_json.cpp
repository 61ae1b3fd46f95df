// No Python file: reads tokenizer.json. Known configurations are recognized exactly; others are refused by name.
#include <algorithm>
#include <array>
#include <unordered_set>
#include <utility>

#include <nlohmann/json.hpp>

#include <mars/errors.hpp>

#include "bundle/fields.hpp"
#include "text/byte_level.hpp"
#include "text/tokenizer_state.hpp"
#include "text/unicode.hpp"
#include "text/utf8.hpp"

namespace mars {

namespace {

using Json = nlohmann::json;

constexpr std::size_t size_limit = 64'000'000;   // bytes
constexpr std::int64_t id_limit = (1 << 24) - 1; // as the manifest's vocab_size
constexpr std::size_t max_added = 1 << 20;       // added tokens

/// Reads the parts of one file into a state and collects problems.
class Reader {
  public:
    Reader(const Json& whole, const std::string& where) : whole_(whole), top_(&whole, where, problems_) {}

    std::shared_ptr<const Tokenizer::State> read(const std::vector<std::string>& control_tokens) {
        top_.text("version", {"1.0"});
        Fields model = top_.object("model");
        check_model(model);
        vocabulary(model);
        if (!problems_.empty()) refuse(); // the following code looks tokens up
        auto state = std::make_shared<Tokenizer::State>(merges(model));
        if (falls_back_) {
            state->metaspace = read_metaspace(whole_, top_);
        } else {
            normalizer(*state);
            pre_tokenizer(*state);
            decoder();
        }
        added_tokens(*state);
        if (top_.has("post_processor")) post_processor(top_.object("post_processor"), *state);
        if (!problems_.empty()) refuse();
        finish(*state);
        for (const std::string& token : control_tokens)
            if (const std::int64_t id = id_of(token); id >= 0) state->tokens[static_cast<std::size_t>(id)].is_control = true;
        return state;
    }

  private:
    [[noreturn]] void refuse() const {
        fail(problems_, "tokenizer", "export again with a BPE tokenizer of a kind that docs/cpp.md lists, or use the Python runtime");
    }

    /// `name` must be absent, null, or one of `harmless`.
    void only(Fields& fields, const Json& object, const char* name, const std::vector<Json>& harmless) {
        const Json& value = member(object, name);
        if (!value.is_null() && std::find(harmless.begin(), harmless.end(), value) == harmless.end())
            fields.wrong(name, "not supported: " + shown(value));
    }

    static std::string shown(const Json& value) {
        const std::string text = value.is_structured() ? (value.is_object() ? "an object" : "a list")
                                                       : value.dump(-1, ' ', false, Json::error_handler_t::replace);
        return text.size() <= 200 ? text : text.substr(0, 197) + "...";
    }

    /// The member of an object, null if absent.
    static const Json& member(const Json& object, const char* name) {
        static const Json null;
        if (!object.is_object()) return null;
        const auto at = object.find(name);
        return at == object.end() ? null : *at;
    }

    static std::string type_of(const Json& part) {
        const Json& type = member(part, "type");
        return type.is_string() ? type.get<std::string>() : "";
    }

    static bool is(const Json& part, const char* name, bool wanted) { return member(part, name) == Json(wanted); }

    void check_model(Fields& model) {
        const Json& raw = member(whole_, "model");
        if (const std::string type = type_of(raw); type != "BPE")
            model.wrong("type", "only BPE is supported, not `" + type.substr(0, 60) + "`");
        only(model, raw, "dropout", {0.0});
        only(model, raw, "continuing_subword_prefix", {""});
        only(model, raw, "end_of_word_suffix", {""});
        only(model, raw, "byte_fallback", {false, true});
        falls_back_ = is(raw, "byte_fallback", true);
        only(model, raw, "ignore_merges", {false, true});
        only(model, raw, "fuse_unk", {false, true}); // no effect if every byte has a token
    }

    void vocabulary(Fields& model) {
        const Json& vocab = member(member(whole_, "model"), "vocab");
        if (!vocab.is_object()) return model.wrong("vocab", "an object of ids by token is expected");
        tokens_.reserve(vocab.size());
        std::unordered_set<std::int64_t> used;
        std::size_t wrong = 0, twice = 0;
        for (const auto& [token, id] : vocab.items()) {
            const bool good = id.is_number_unsigned() && id.get<std::uint64_t>() <= static_cast<std::uint64_t>(id_limit);
            wrong += good ? 0 : 1;
            if (!good) continue;
            twice += used.insert(id.get<std::int64_t>()).second ? 0 : 1;
            tokens_.emplace(token, id.get<std::int64_t>());
        }
        if (wrong > 0) model.wrong("vocab", std::to_string(wrong) + " ids are not integers of 0 to " + std::to_string(id_limit));
        if (twice > 0) model.wrong("vocab", std::to_string(twice) + " ids belong to two tokens");
        num_model_tokens_ = tokens_.size();
    }

    /// Ids that plain text never becomes, whatever the merges are.
    std::unordered_set<std::int64_t> special_ids() const {
        std::unordered_set<std::int64_t> ids;
        const Json& added = member(whole_, "added_tokens");
        for (std::size_t i = 0; added.is_array() && i < added.size(); ++i)
            if (is(added[i], "special", true) && member(added[i], "id").is_number_unsigned())
                ids.insert(added[i]["id"].get<std::int64_t>());
        return ids;
    }

    Bpe merges(Fields& model) {
        const Json& raw = member(whole_, "model");
        const std::unordered_set<std::int64_t> special = special_ids();
        std::array<std::int32_t, 256> byte_ids;
        std::size_t missing = 0;
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::int64_t id = id_of(falls_back_ ? byte_token(static_cast<unsigned>(byte)) : byte_characters()[byte]);
            byte_ids[byte] = static_cast<std::int32_t>(id);
            missing += id < 0 ? 1 : 0;
        }
        if (missing > 0 && falls_back_)
            model.wrong("byte_fallback", std::to_string(missing) + " of the tokens <0x00> to <0xFF> are missing");
        if (missing > 0 && !falls_back_ && !member(raw, "unk_token").is_null())
            model.wrong("unk_token", "not supported: " + std::to_string(missing) + " bytes have no token of their own");
        const Json& list = member(raw, "merges");
        if (!list.is_array()) model.wrong("merges", "a list is expected");
        Bpe bpe(byte_ids, list.is_array() ? list.size() : 0);
        std::size_t wrong = 0, first = 0;
        for (std::size_t i = 0; list.is_array() && i < list.size(); ++i) {
            const auto [left, right] = pair_of(list[i]);
            const std::int64_t ids[] = {id_of(left), id_of(right), id_of(left + right)};
            if (*std::min_element(std::begin(ids), std::end(ids)) < 0) {
                first = wrong++ == 0 ? i : first;
                continue;
            }
            if (special.count(ids[2]) > 0) continue;
            bpe.add_merge(static_cast<std::int32_t>(ids[0]), static_cast<std::int32_t>(ids[1]), static_cast<std::int32_t>(ids[2]));
        }
        if (wrong > 0)
            model.wrong("merges",
                        std::to_string(wrong) + " are not two tokens that make a third, the first of them number " + std::to_string(first));
        if (is(raw, "ignore_merges", true)) {
            for (const auto& [token, id] : tokens_)
                if (auto bytes = special.count(id) > 0 ? std::nullopt : falls_back_ ? std::optional(token) : bytes_of_characters(token))
                    bpe.add_whole(std::move(*bytes), static_cast<std::int32_t>(id));
        }
        for (const auto& [token, id] : tokens_) {
            std::size_t end = 0;
            if (!falls_back_ || token.empty()) continue;
            const char32_t character = utf8::next(token, end);
            if (end == token.size()) bpe.add_character(character, static_cast<std::int32_t>(id));
        }
        return bpe;
    }

    /// Reads both forms of a merge: "a b" and ["a", "b"]. Empty strings for anything else.
    static std::pair<std::string, std::string> pair_of(const Json& merge) {
        if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string())
            return {merge[0].get<std::string>(), merge[1].get<std::string>()};
        if (!merge.is_string()) return {};
        const auto& text = merge.get_ref<const std::string&>();
        const std::size_t space = text.find(' ');
        if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) return {};
        return {text.substr(0, space), text.substr(space + 1)};
    }

    std::int64_t id_of(const std::string& token) const {
        const auto entry = tokens_.find(token);
        return entry == tokens_.end() ? Bpe::no_token : entry->second;
    }

    void normalizer(Tokenizer::State& state) {
        const Json& part = member(whole_, "normalizer");
        if (part.is_null()) return;
        state.nfc = type_of(part) == "NFC";
        if (!state.nfc) top_.wrong("normalizer", "only NFC is supported, not " + named(part));
    }

    static std::string named(const Json& part) {
        const std::string type = type_of(part);
        return type.empty() ? shown(part) : "`" + type.substr(0, 60) + "`";
    }

    void pre_tokenizer(Tokenizer::State& state) {
        const Json& whole = member(whole_, "pre_tokenizer");
        const Json& list = member(whole, "pretokenizers");
        const bool is_sequence = type_of(whole) == "Sequence" && list.is_array();
        // Pointers, because copying deeply nested hostile JSON would overflow the stack.
        std::vector<const Json*> parts;
        if (!is_sequence) parts.push_back(&whole);
        for (std::size_t i = 0; is_sequence && i < list.size(); ++i) parts.push_back(&list[i]);
        for (const Json* part : parts)
            if (const std::string problem = split_of(*part, state); !problem.empty()) top_.wrong("pre_tokenizer", problem);
        const auto is_byte_level = [](const Json* part) { return type_of(*part) == "ByteLevel"; };
        if (parts.empty() || std::find_if(parts.begin(), parts.end(), is_byte_level) != parts.end() - 1)
            top_.wrong("pre_tokenizer", "must end in its one `ByteLevel`");
    }

    /// Add the split of one pre-tokenizer; returns what is wrong with it.
    static std::string split_of(const Json& part, Tokenizer::State& state) {
        const std::string type = type_of(part);
        if (type == "ByteLevel") {
            if (!is(part, "add_prefix_space", false)) return "`ByteLevel` is only supported with add_prefix_space false";
            if (!is(part, "use_regex", false)) state.splits.push_back(Split::gpt2);
            return is(part, "use_regex", false) || is(part, "use_regex", true) || member(part, "use_regex").is_null()
                       ? ""
                       : "`use_regex` must be a boolean";
        }
        if (type == "Digits") {
            state.splits.push_back(Split::digits);
            return is(part, "individual_digits", true) ? "" : "`Digits` is only supported with individual_digits true";
        }
        if (type != "Split") return named(part) + " is not supported (known: Split, Digits, ByteLevel)";
        const Json& pattern = member(member(part, "pattern"), "Regex");
        const auto split = pattern.is_string() ? split_of_pattern(pattern.get_ref<const std::string&>()) : std::nullopt;
        if (!split)
            return "`Split` with this pattern is not supported (known: Qwen2's and Llama 3's): " +
                   shown(member(part, "pattern").is_object() ? pattern : part);
        state.splits.push_back(*split);
        return member(part, "behavior") == Json("Isolated") && is(part, "invert", false)
                   ? ""
                   : "`Split` is only supported as Isolated and not inverted";
    }

    void decoder() {
        const Json& part = member(whole_, "decoder");
        if (type_of(part) != "ByteLevel") top_.wrong("decoder", "only ByteLevel is supported, not " + named(part));
    }

    void added_tokens(Tokenizer::State& state) {
        if (!top_.has("added_tokens")) return;
        std::vector<std::pair<std::string, std::int64_t>> verbatim, normalized;
        std::unordered_set<std::string> seen;
        std::int64_t next = static_cast<std::int64_t>(num_model_tokens_);
        for (Fields& fields : top_.objects("added_tokens", max_added)) {
            const std::size_t before = problems_.size();
            const std::string content = fields.text("content");
            const std::int64_t id = fields.integer("id", 0, id_limit);
            for (const char* name : {"single_word", "lstrip", "rstrip"})
                if (fields.flag(name)) fields.wrong(name, "not supported for `" + content.substr(0, 60) + "`");
            const bool is_normalized = fields.flag("normalized"), is_special = fields.flag("special");
            if (problems_.size() != before) continue;
            // Hugging Face assigns the ids itself and only warns if the file has others.
            const std::int64_t expected = id_of(content) >= 0 ? id_of(content) : next;
            if (id != expected)
                fields.wrong("id", "`" + content.substr(0, 60) + "` has " + std::to_string(id) + " where its place gives it " +
                                       std::to_string(expected));
            if (id_of(content) < 0) next = std::max(next, id) + 1;
            tokens_.emplace(content, id);
            std::string sought = content;
            if (is_normalized && state.nfc) sought = to_nfc(content).value_or(content);
            if (is_normalized && state.metaspace && state.metaspace->by_normalizer) sought = state.metaspace->written(content, false);
            // As in Hugging Face: a token whose text normalization changes is stored in normal form and is no longer
            // special.
            if (sought != content) rewritten_.emplace(id, sought);
            if (is_special && sought == content) special_.insert(id);
            if (!seen.insert((is_normalized ? "n" : "v") + sought).second)
                fields.wrong("content", "`" + content.substr(0, 60) + "` is there twice");
            (is_normalized ? normalized : verbatim).emplace_back(std::move(sought), id);
        }
        if (!problems_.empty()) return;
        state.verbatim = AddedTokens(std::move(verbatim));
        state.normalized = AddedTokens(std::move(normalized));
    }

    void post_processor(Fields fields, Tokenizer::State& state) {
        const std::string type = fields.text("type");
        if (type == "ByteLevel") return; // changes offsets only
        if (type == "Sequence") {
            if (++depth_ > 8) return fields.wrong("", "nested too deeply");
            for (const Fields& part : fields.objects("processors")) post_processor(part, state);
        } else if (type != "TemplateProcessing") {
            fields.wrong("type", "`" + type.substr(0, 60) + "` is not supported (known: ByteLevel, TemplateProcessing, Sequence)");
        } else if (templated_) {
            fields.wrong("", "a second template is not supported");
        } else {
            template_processing(fields, state);
        }
    }

    void template_processing(Fields& fields, Tokenizer::State& state) {
        templated_ = true;
        bool text_seen = false;
        Fields known = fields.object("special_tokens");
        for (Fields& piece : fields.objects("single")) {
            if (piece.has("Sequence")) {
                if (text_seen || piece.object("Sequence").text("id") != "A") piece.wrong("Sequence", "the text `A` must be there once");
                text_seen = true;
                continue;
            }
            const std::vector<std::int64_t> ids = known.object(piece.object("SpecialToken").text("id")).integers("ids", id_limit);
            auto& side = text_seen ? state.after : state.before;
            side.insert(side.end(), ids.begin(), ids.end());
        }
        if (!text_seen) fields.wrong("single", "the text `A` must be there once");
    }

    void finish(Tokenizer::State& state) {
        std::int64_t last = -1;
        for (const auto& entry : tokens_) last = std::max(last, entry.second);
        state.tokens.resize(static_cast<std::size_t>(last + 1));
        for (const auto& [token, id] : tokens_) {
            const auto changed = rewritten_.find(id);
            const std::string& written = changed == rewritten_.end() ? token : changed->second;
            Tokenizer::State::Token& made = state.tokens[static_cast<std::size_t>(id)] = token_of(written, special_.count(id) > 0);
            made.is_control = made.is_special;
        }
    }

    Tokenizer::State::Token token_of(const std::string& written, bool is_special) const {
        if (!falls_back_) return {bytes_of_characters(written).value_or(written), is_special, false};
        if (const auto byte = byte_of_token(written)) return {std::string(1, *byte), is_special, true};
        return {without_marks(written), is_special, false};
    }

    const Json& whole_;
    std::vector<std::string> problems_;
    Fields top_;
    std::unordered_map<std::string, std::int64_t> tokens_;
    std::unordered_map<std::int64_t, std::string> rewritten_;
    std::unordered_set<std::int64_t> special_;
    std::size_t num_model_tokens_ = 0;
    int depth_ = 0;
    bool templated_ = false, falls_back_ = false;
};

} // namespace

Tokenizer Tokenizer::from_json(std::string_view tokenizer_json, std::string_view where, const std::vector<std::string>& control_tokens) {
    const std::string name(where);
    if (tokenizer_json.size() > size_limit)
        throw BundleError(name + ": larger than " + std::to_string(size_limit) + " bytes; this is not a tokenizer");
    const Json whole = parse_json(tokenizer_json, name);
    return Tokenizer(Reader(whole, name).read(control_tokens));
}

} // namespace mars
