// runtime/bundle/open.py: opens a bundle and checks its files.
#include <algorithm>

#include <mars/errors.hpp>

#include "bundle/bundle.hpp"
#include "bundle/files.hpp"
#include "bundle/sha256.hpp"
#include "joined.hpp"

namespace mars {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t manifest_limit = 16000000, checksum_limit = 1000; // bytes

// Limits of safe mode, as in runtime/bundle/open.py.
constexpr std::size_t safe_manifest = 1000000, safe_files = 64;
constexpr std::int64_t safe_graph = 64000000, safe_tokenizer = 64000000; // bytes

/// Throws BundleError for a bundle that exceeds the limits of safe mode.
void check_sizes(const Manifest& manifest, std::size_t num_bytes, const std::string& where) {
    std::string problems;
    const auto note = [&](const std::string& what, auto has, auto most) {
        if (has > most) problems += "\n  " + what + ": " + std::to_string(has) + ", " + std::to_string(most) + " are allowed";
    };
    note("bytes of the manifest", num_bytes, safe_manifest);
    note("files", manifest.files.size(), safe_files);
    for (const FileEntry& entry : manifest.files) {
        const auto is_graph = [&](const Variant& v) {
            return v.engine ? v.engine->graph == entry.path : !v.is_engine() && v.file == entry.path;
        };
        if (std::any_of(manifest.variants.begin(), manifest.variants.end(), is_graph))
            note("bytes of " + entry.path, entry.size, safe_graph);
        if (manifest.text && manifest.text->tokenizer == entry.path) note("bytes of " + entry.path, entry.size, safe_tokenizer);
    }
    if (!problems.empty()) throw BundleError(where + ": beyond the limits of safe mode:" + problems + "\n  " + std::string(safe_remedy));
}

} // namespace

std::optional<std::size_t> EngineInfo::range_for(std::int64_t rows, std::int64_t slots, std::int64_t outputs) const {
    for (std::size_t i = 0; i < ranges.size(); ++i)
        if (ranges[i].batch.holds(rows) && ranges[i].slots.holds(slots) && ranges[i].outputs.holds(outputs)) return i;
    return std::nullopt;
}

std::int64_t EngineInfo::largest(Extent ShapeRange::* dimension) const {
    std::int64_t most = 0;
    for (const ShapeRange& range : ranges) most = std::max(most, (range.*dimension).max);
    return most;
}

const Variant& Bundle::variant(std::string_view name) const {
    for (const Variant& variant : manifest.variants)
        if (variant.name == name) return variant;
    throw BundleError(path.string() + ": no variant `" + std::string(name) +
                      "` (there are: " + joined(manifest.variants, ", ", &Variant::name) + ")");
}

Bundle open_bundle(const fs::path& path, Verify how, bool safe) {
    const fs::path file = path / "manifest.json";
    std::error_code error;
    if (!fs::is_regular_file(file, error)) {
        const std::string what = fs::is_directory(path, error) ? "not a bundle: it has no manifest.json" : "no such bundle";
        throw BundleError(path.string() + ": " + what + "; make one with `mars-export onnx CHECKPOINT -o " + path.string() + "`");
    }
    const std::optional<std::string> text = read_file(file, manifest_limit + 1);
    if (!text) throw BundleError(file.string() + ": not readable");
    if (text->size() > manifest_limit)
        throw BundleError(file.string() + ": larger than " + std::to_string(manifest_limit) + " bytes; this is not a manifest");
    Manifest manifest = parse_manifest(*text, file.string());
    if (read_file(path / "manifest.sha256", checksum_limit) != sha256(*text) + "  manifest.json\n")
        throw BundleError(path.string() + ": manifest.json does not match manifest.sha256; copy or export the bundle again");
    if (safe) check_sizes(manifest, text->size(), path.string());
    verify(path, manifest, how, safe);
    return Bundle{path, std::move(manifest)};
}

} // namespace mars
