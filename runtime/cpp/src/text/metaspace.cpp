#include "text/metaspace.hpp"

namespace mars {

namespace {

using Json = nlohmann::json;

constexpr std::string_view mark = "\u2581";

// The parts of tokenizer.json that are known.
const Json prepend = Json::parse(R"({"type": "Prepend", "prepend": "▁"})");
const Json replace = Json::parse(R"({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})");
const Json decoders =
    Json::parse(R"([{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}])");
const Json strip = Json::parse(R"({"type": "Strip", "content": " ", "start": 1, "stop": 0})");

std::string replaced(std::string_view text, std::string_view what, std::string_view by) {
    std::string out;
    for (std::size_t from = 0;;) {
        const std::size_t at = text.find(what, from);
        out += text.substr(from, at - from);
        if (at == std::string_view::npos) return out;
        out += by;
        from = at + what.size();
    }
}

bool is_sequence(const Json& whole, const char* parts, const Json& wanted) {
    return whole.is_object() && whole.contains("type") && whole["type"] == "Sequence" && whole.contains(parts) && whole[parts] == wanted;
}

std::optional<Metaspace> of_normalizer(const Json& given) {
    Metaspace metaspace;
    metaspace.by_normalizer = true;
    if (given == replace || is_sequence(given, "normalizers", Json::array({replace}))) return metaspace;
    metaspace.prefix = Metaspace::Prefix::normalizer;
    if (is_sequence(given, "normalizers", Json::array({prepend, replace}))) return metaspace;
    return std::nullopt;
}

std::optional<Metaspace> of_pre_tokenizer(const Json& given) {
    Metaspace metaspace;
    for (const auto& [name, prefix] : {std::pair("never", Metaspace::Prefix::never), std::pair("first", Metaspace::Prefix::first),
                                       std::pair("always", Metaspace::Prefix::always)})
        for (const bool splits : {false, true}) {
            metaspace.prefix = prefix;
            metaspace.splits = splits;
            if (given == Json{{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", name}, {"split", splits}}) return metaspace;
        }
    return std::nullopt;
}

} // namespace

std::string Metaspace::written(std::string_view text, bool is_first) const {
    std::string out = replaced(text, " ", mark);
    const bool has_mark = out.compare(0, mark.size(), mark) == 0;
    const bool wants = prefix == Prefix::normalizer || (!has_mark && (prefix == Prefix::always || (prefix == Prefix::first && is_first)));
    if (wants && !out.empty()) out.insert(0, mark);
    return out;
}

void Metaspace::cut(std::string_view text, std::vector<std::string_view>& words) const {
    while (splits && !text.empty()) {
        const std::size_t next = text.find(mark, 1);
        words.push_back(text.substr(0, next));
        text.remove_prefix(next == std::string_view::npos ? text.size() : next);
    }
    if (!text.empty()) words.push_back(text);
}

Metaspace read_metaspace(const Json& whole, Fields& top) {
    const auto given = [&](const char* name) { return whole.is_object() && whole.contains(name) ? &whole.at(name) : nullptr; };
    const auto is_absent = [](const Json* value) { return value == nullptr || value->is_null(); };
    const Json *normalizer = given("normalizer"), *pre_tokenizer = given("pre_tokenizer"), *decoder = given("decoder");
    std::optional<Metaspace> metaspace;
    if (is_absent(pre_tokenizer) && !is_absent(normalizer)) metaspace = of_normalizer(*normalizer);
    if (is_absent(normalizer) && !is_absent(pre_tokenizer)) metaspace = of_pre_tokenizer(*pre_tokenizer);
    if (!metaspace)
        top.wrong("normalizer", "with byte fallback, only Prepend and Replace of a space by U+2581, or a Metaspace pre-tokenizer alone");
    Json stripping = decoders;
    stripping.push_back(strip);
    const bool strips = !is_absent(decoder) && is_sequence(*decoder, "decoders", stripping);
    if (!strips && (is_absent(decoder) || !is_sequence(*decoder, "decoders", decoders)))
        top.wrong("decoder", "with byte fallback, only Replace, ByteFallback, Fuse and Strip of one leading space, in this order");
    Metaspace result = metaspace.value_or(Metaspace());
    result.leaves_first_space = strips;
    return result;
}

std::string byte_token(unsigned byte) {
    const char* digits = "0123456789ABCDEF";
    return {'<', '0', 'x', digits[byte >> 4], digits[byte & 15], '>'};
}

std::optional<char> byte_of_token(std::string_view token) {
    const auto digit = [](char c) {
        return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
    };
    if (token.size() != 6 || token.substr(0, 3) != "<0x" || token.back() != '>') return std::nullopt;
    const int high = token[3] == '+' ? 0 : digit(token[3]), low = digit(token[4]); // Rust accepts a sign here
    if (high < 0 || low < 0) return std::nullopt;
    return static_cast<char>(high * 16 + low);
}

std::string without_marks(std::string_view token) { return replaced(token, mark, " "); }

} // namespace mars
