#include "bundle/fields.hpp"

#include <algorithm>
#include <cmath>
#include <set>

#include <mars/config.hpp>
#include <mars/errors.hpp>

#include "joined.hpp"

namespace mars {

namespace {

using Json = Fields::Json;

std::string kind(const Json* value) {
    if (value == nullptr || value->is_null()) return "nothing";
    if (value->is_object()) return "an object";
    if (value->is_array()) return "a list";
    const std::string text = value->dump(-1, ' ', false, Json::error_handler_t::replace);
    return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

bool is_within(const Json& value, std::int64_t low, std::int64_t high) {
    if (value.is_number_unsigned()) {
        const auto number = value.get<std::uint64_t>();
        return number <= static_cast<std::uint64_t>(high) && static_cast<std::int64_t>(number) >= low;
    }
    return value.is_number_integer() && value.get<std::int64_t>() >= low && value.get<std::int64_t>() <= high;
}

constexpr int max_depth = 100;
constexpr std::size_t max_list = 20; // problems shown

/// Whether lists and objects are nested too deep; checked before anything is parsed.
bool is_too_deep(std::string_view text) {
    int depth = 0;
    bool in_string = false;
    for (std::size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (in_string && c == '\\') ++i;
        if (c == '"') in_string = !in_string;
        if (in_string) continue;
        if ((c == '[' || c == '{') && ++depth > max_depth) return true;
        if (c == ']' || c == '}') --depth;
    }
    return false;
}

} // namespace

Json parse_json(std::string_view text, const Json::parser_callback_t& check) {
    if (is_too_deep(text)) throw std::runtime_error("lists nested too deep");
    return Json::parse(text, check);
}

Json parse_json(std::string_view text, const std::string& where, bool has_unique_names) {
    std::vector<std::set<std::string>> names; // of the open objects
    const auto check = [&](int, Json::parse_event_t event, Json& value) {
        if (event == Json::parse_event_t::object_start) names.emplace_back();
        if (event == Json::parse_event_t::object_end) names.pop_back();
        if (event == Json::parse_event_t::key && !names.back().insert(value.get<std::string>()).second)
            throw std::runtime_error("the name `" + value.get<std::string>().substr(0, 60) + "` is given twice");
        return true;
    };
    try {
        return parse_json(text, has_unique_names ? Json::parser_callback_t(check) : nullptr);
    } catch (const std::exception& error) {
        throw BundleError(where + ": not valid JSON (" + error.what() + "); copy or export the bundle again");
    }
}

void fail(const std::vector<std::string>& problems, const std::string& what, const std::string& advice) {
    std::string text = std::to_string(problems.size()) + " problems in the " + what + ":";
    for (std::size_t i = 0; i < std::min(problems.size(), max_list); ++i) text += "\n  " + problems[i];
    throw BundleError(text + (advice.empty() ? "" : "\n  " + advice));
}

Fields::Fields(const Json* value, std::string place, std::vector<std::string>& problems)
    : where(std::move(place)), value_(value != nullptr && value->is_object() ? value : nullptr), problems_(&problems) {
    if (value_ == nullptr) wrong("", "an object is expected, not " + kind(value));
}

void Fields::wrong(const std::string& name, const std::string& what) {
    problems_->push_back(where + (name.empty() ? "" : ".") + name + ": " + what);
}

std::int64_t Fields::integer(const std::string& name, std::int64_t low, std::int64_t high) {
    const Json* value = find(name);
    if (value != nullptr && is_within(*value, low, high)) return value->get<std::int64_t>();
    wrong(name, "an integer of " + std::to_string(low) + " to " + std::to_string(high) + " is expected, not " + kind(value));
    return low;
}

std::optional<std::int64_t> Fields::optional_integer(const std::string& name, std::int64_t low, std::int64_t high) {
    return has(name) ? std::optional(integer(name, low, high)) : std::nullopt;
}

double Fields::number(const std::string& name) {
    const Json* value = find(name);
    if (value != nullptr && value->is_number() && std::isfinite(value->get<double>())) return value->get<double>();
    wrong(name, "a finite number is expected, not " + kind(value));
    return 0.0;
}

std::int64_t Fields::masks(const std::string& name) {
    const Json* value = find(name);
    const bool is_word = value != nullptr && (*value == Json("auto") || *value == Json("full"));
    if (is_word) return *masks_of(value->get_ref<const std::string&>());
    if (value != nullptr && is_within(*value, 0, std::int64_t{1} << 53)) return value->get<std::int64_t>();
    wrong(name, "auto, full or an integer of 0 or more is expected, not " + kind(value));
    return all_masks;
}

bool Fields::flag(const std::string& name) {
    const Json* value = find(name);
    if (value != nullptr && value->is_boolean()) return value->get<bool>();
    wrong(name, "true or false is expected, not " + kind(value));
    return false;
}

std::string Fields::text(const std::string& name, const std::vector<std::string>& choices) {
    const Json* value = find(name);
    if (value == nullptr || !value->is_string() || value->get_ref<const std::string&>().empty()) {
        wrong(name, "a non-empty string is expected, not " + kind(value));
        return choices.empty() ? "?" : choices.front();
    }
    const auto& text = value->get_ref<const std::string&>();
    if (!choices.empty() && std::find(choices.begin(), choices.end(), text) == choices.end())
        wrong(name, "`" + text.substr(0, 60) + "` is not one of " + joined(choices));
    return text;
}

std::optional<std::string> Fields::optional_text(const std::string& name) { return has(name) ? std::optional(text(name)) : std::nullopt; }

std::vector<std::int64_t> Fields::integers(const std::string& name, std::int64_t high, std::size_t most) {
    std::vector<std::int64_t> good;
    const Json* values = list(name, most);
    if (values == nullptr) return good;
    for (const Json& value : *values)
        if (is_within(value, 0, high)) good.push_back(value.get<std::int64_t>());
    if (good.size() != values->size()) wrong(name, "integers of 0 to " + std::to_string(high) + " are expected");
    return good;
}

std::vector<std::string> Fields::texts(const std::string& name, std::size_t most) {
    std::vector<std::string> good;
    const Json* values = list(name, most);
    if (values == nullptr) return good;
    for (const Json& value : *values)
        if (value.is_string()) good.push_back(value.get<std::string>());
    if (good.size() != values->size()) wrong(name, "strings are expected");
    return good;
}

std::map<std::string, std::string> Fields::named_texts(const std::string& name) {
    std::map<std::string, std::string> good;
    Fields values = object(name);
    for (const std::string& key : values.names()) {
        const Json* value = values.find(key);
        if (value != nullptr && value->is_string()) good[key] = value->get<std::string>();
        if (good.count(key) == 0) values.wrong(key, "a string is expected, not " + kind(value));
    }
    return good;
}

Fields Fields::object(const std::string& name) { return {find(name), where + "." + name, *problems_}; }

std::vector<Fields> Fields::objects(const std::string& name, std::size_t most) {
    std::vector<Fields> all;
    const Json* values = list(name, most);
    if (values == nullptr) return all;
    for (const Json& value : *values) all.emplace_back(&value, where + "." + name + "[" + std::to_string(all.size()) + "]", *problems_);
    return all;
}

std::vector<std::string> Fields::names() {
    std::vector<std::string> all;
    if (value_ == nullptr || !is_short("", *value_, max_entries_kept)) return all;
    for (const auto& field : value_->items()) all.push_back(field.key());
    return all;
}

std::string Fields::dump() const { return value_ == nullptr ? "{}" : value_->dump(-1, ' ', false, Json::error_handler_t::replace); }

const Json* Fields::find(const std::string& name) const {
    if (value_ == nullptr) return nullptr;
    const auto at = value_->find(name);
    return at == value_->end() || at->is_null() ? nullptr : &*at;
}

const Json* Fields::list(const std::string& name, std::size_t most) {
    const Json* value = find(name);
    if (value != nullptr && value->is_array()) return is_short(name, *value, most) ? value : nullptr;
    wrong(name, "a list is expected, not " + kind(value));
    return nullptr;
}

bool Fields::is_short(const std::string& name, const Json& value, std::size_t most) {
    if (value.size() <= most) return true;
    wrong(name, "at most " + std::to_string(most) + " entries are expected, not " + std::to_string(value.size()));
    return false;
}

} // namespace mars
