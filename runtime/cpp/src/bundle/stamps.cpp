#include "bundle/stamps.hpp"

#include <cstdlib>
#include <string>

#include "bundle/fields.hpp"
#include "bundle/files.hpp"
#include "bundle/sha256.hpp"

namespace mars {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t stamp_limit = 1000000; // bytes

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

} // namespace

std::optional<fs::path> cache_dir() {
    const std::string chosen = variable("MARS_EXPORT_CACHE"), base = variable("XDG_CACHE_HOME"), home = variable("HOME");
    if (chosen == "~" || chosen.rfind("~/", 0) == 0) return home.empty() ? std::nullopt : std::optional<fs::path>(home + chosen.substr(1));
    if (!chosen.empty()) return chosen;
    if (!base.empty()) return fs::path(base) / "mars-export";
    return home.empty() ? std::nullopt : std::optional<fs::path>(fs::path(home) / ".cache" / "mars-export");
}

std::optional<fs::path> stamp_file(const fs::path& bundle) {
    const std::optional<fs::path> cache = cache_dir();
    std::error_code error;
    const fs::path whole = fs::canonical(bundle, error);
    if (!cache || error) return std::nullopt;
    return *cache / "verified" / (sha256(whole.native()).substr(0, 32) + ".json");
}

nlohmann::json read_stamps(const fs::path& file) {
    const std::optional<std::string> text = read_file(file, stamp_limit + 1);
    try {
        nlohmann::json value = text && text->size() <= stamp_limit ? parse_json(*text) : nlohmann::json();
        if (value.is_object()) return value;
    } catch (const std::exception&) { // damaged or hostile: hash every file
    }
    return nlohmann::json::object();
}

void write_stamps(const fs::path& file, const nlohmann::json& stamps) {
    std::error_code error;
    fs::create_directories(file.parent_path(), error);
    fs::permissions(file.parent_path(), fs::perms::owner_all, error);
    if (!error) write_whole(file, stamps.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace));
}

} // namespace mars
