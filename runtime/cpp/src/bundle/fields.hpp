// runtime/bundle/fields.py: typed reading of untrusted JSON objects. All problems are reported at once.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace mars {

/// Parse JSON that is nested at most 100 deep. Throws std::runtime_error.
///
/// Copying, comparing and printing JSON recurse as deep as the input nests, so hostile input must be limited.
nlohmann::json parse_json(std::string_view text, const nlohmann::json::parser_callback_t& check = nullptr);

/// The same for a part of a bundle that messages call `where`. `has_unique_names`: an object with a name twice is an
/// error, because readers would disagree on its value. Throws BundleError.
nlohmann::json parse_json(std::string_view text, const std::string& where, bool has_unique_names = false);

/// Throws one BundleError for all `problems` of `what`. It lists some of them, then `advice`.
[[noreturn]] void fail(const std::vector<std::string>& problems, const std::string& what, const std::string& advice = "");

constexpr std::size_t max_entries_kept = 100000; // of a list or object for which the format has no other limit

/// One JSON object at `where`, such as `manifest.json.model`. Getters return a harmless value after recording a
/// problem. Lists and objects have at most `most` entries.
class Fields {
  public:
    using Json = nlohmann::json;

    /// `value` and `problems` must outlive this. A null `value` stands for a missing field.
    Fields(const Json* value, std::string place, std::vector<std::string>& problems);

    void wrong(const std::string& name, const std::string& what);

    std::int64_t integer(const std::string& name, std::int64_t low = 0, std::int64_t high = std::int64_t{1} << 53);
    std::optional<std::int64_t> optional_integer(const std::string& name, std::int64_t low = 0, std::int64_t high = std::int64_t{1} << 53);
    double number(const std::string& name);
    /// "auto", "full", or an integer of 0 or more.
    std::int64_t masks(const std::string& name);
    bool flag(const std::string& name);
    std::string text(const std::string& name, const std::vector<std::string>& choices = {});
    std::optional<std::string> optional_text(const std::string& name);
    std::vector<std::int64_t> integers(const std::string& name, std::int64_t high, std::size_t most = max_entries_kept);
    std::vector<std::string> texts(const std::string& name, std::size_t most = max_entries_kept);
    /// An object with string values, which may be empty.
    std::map<std::string, std::string> named_texts(const std::string& name);
    Fields object(const std::string& name);
    std::vector<Fields> objects(const std::string& name, std::size_t most = max_entries_kept);

    /// The names of all fields; none if there are too many.
    std::vector<std::string> names();
    bool has(const std::string& name) const { return find(name) != nullptr; }
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
