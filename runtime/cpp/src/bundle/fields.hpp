// Typed reading of untrusted JSON objects: every wrong field is noted, so that all of them can be reported at once.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace mars {

/// Parse JSON in which lists and objects are nested at most 100 deep. Throws std::runtime_error that says what is wrong.
///
/// To copy, compare or print a JSON value is a recursion as deep as its author likes; the format needs six, and evidence is anybody's.
nlohmann::json parse_json(std::string_view text);

/// The same for a part of a bundle, called `where`. Throws BundleError.
nlohmann::json parse_json(std::string_view text, const std::string& where);

/// A document of the format, called `where`: no name is twice in an object, of which another reader may take the other. Throws BundleError.
nlohmann::json parse_document(std::string_view text, const std::string& where);

/// One BundleError for all `problems` of `what`, of which it lists some, and `advice` at its end.
[[noreturn]] void fail(const std::vector<std::string>& problems, const std::string& what, const std::string& advice = "");

constexpr std::size_t most_entries = 100000; // of a list or object of which the format says nothing else

/// One JSON object at `where`, such as `manifest.json.model`. Getters return a harmless value after noting a problem; lists and objects have
/// at most `most` entries.
class Fields {
  public:
    using Json = nlohmann::json;

    /// `value` and `problems` outlive this; no value stands for a field that is not there.
    Fields(const Json* value, std::string place, std::vector<std::string>& problems);

    void wrong(const std::string& name, const std::string& what);

    std::int64_t integer(const std::string& name, std::int64_t low = 0, std::int64_t high = std::int64_t{1} << 53);
    std::optional<std::int64_t> optional_integer(const std::string& name, std::int64_t low = 0, std::int64_t high = std::int64_t{1} << 53);
    double number(const std::string& name);
    /// "auto", "full", or an integer of 1 or more.
    std::int64_t window(const std::string& name);
    bool flag(const std::string& name);
    std::string text(const std::string& name, const std::vector<std::string>& choices = {});
    std::optional<std::string> optional_text(const std::string& name);
    std::vector<std::int64_t> integers(const std::string& name, std::int64_t high, std::size_t most = most_entries);
    std::vector<std::string> texts(const std::string& name, std::size_t most = most_entries);
    /// An object whose values are strings, empty ones included.
    std::map<std::string, std::string> named_texts(const std::string& name);
    Fields object(const std::string& name);
    std::vector<Fields> objects(const std::string& name, std::size_t most = most_entries);
    /// An object that is kept as it stands, as JSON text: at most 32 levels.
    std::string evidence(const std::string& name);

    /// The names of all fields, where there are not too many.
    std::vector<std::string> names();

    /// Whether the field is there and not null.
    bool has(const std::string& name) const { return find(name) != nullptr; }

    /// This object as JSON text.
    std::string dump() const;

    std::string where;

  private:
    const Json* find(const std::string& name) const;
    const Json* list(const std::string& name, std::size_t most);
    bool is_short(const std::string& name, const Json& value, std::size_t most);

    const Json* value_;
    std::vector<std::string>* problems_;
};

} // namespace mars
