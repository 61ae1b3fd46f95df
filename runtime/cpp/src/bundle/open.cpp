// Opening a bundle directory: manifest, checksum, files.
#include <algorithm>
#include <fcntl.h>

#include <mars/errors.hpp>

#include "bundle/bundle.hpp"
#include "bundle/files.hpp"
#include "bundle/sha256.hpp"

namespace mars {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t manifest_limit = 16000000, checksum_limit = 1000; // bytes
constexpr int most_attempts = 20;                                       // to open a bundle that is written to meanwhile

// Of safe mode, as Python's runtime/bundle/safe.py has them.
constexpr std::size_t safe_manifest = 1000000, safe_files = 64;
constexpr std::int64_t safe_graph = 64000000, safe_tokenizer = 64000000; // bytes

/// What `sha256sum manifest.json` prints.
std::string checksum_line(std::string_view data) {
    Sha256 digest;
    digest.add(data);
    return digest.hex() + "  manifest.json\n";
}

/// Whether a line of the checksum file vouches for `manifest`. There are two where a rewrite was interrupted.
bool is_vouched_for(std::string_view checksums, std::string_view manifest) {
    const std::string wanted = checksum_line(manifest);
    for (std::size_t start = 0; start < checksums.size();) {
        const std::size_t end = std::min(checksums.find('\n', start), checksums.size() - 1) + 1;
        if (checksums.substr(start, end - start) == wanted) return true;
        start = end;
    }
    return false;
}

struct Read {
    std::string text;
    bool is_vouched_for = false;
};

/// The manifest's bytes, and whether the checksum is theirs. A writer may be at work between the two: then read again.
Read read_manifest(const Held& held) {
    const fs::path file = held.directory() / "manifest.json";
    for (std::string before;;) {
        const std::optional<std::string> text = PlainFile(held.place() / "manifest.json", O_NOFOLLOW).read(manifest_limit + 1);
        if (!text) throw BundleError(file.string() + ": not readable");
        if (text->size() > manifest_limit)
            throw BundleError(file.string() + ": larger than " + std::to_string(manifest_limit) + " bytes; this is not a manifest");
        const auto sums = PlainFile(held.place() / "manifest.sha256", O_NOFOLLOW).read(checksum_limit);
        const bool is_good = is_vouched_for(sums.value_or(""), *text);
        if (is_good || *text == before) return {*text, is_good};
        before = *text;
    }
}

/// Throws BundleError for a bundle that is larger than any of ours need be.
void check_sizes(const Manifest& manifest, std::size_t num_bytes, const std::string& where) {
    std::string problems;
    const auto note = [&](const std::string& what, auto has, auto most) {
        if (has > most) problems += "\n  " + what + ": " + std::to_string(has) + ", " + std::to_string(most) + " are taken";
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
    if (!problems.empty()) throw BundleError(where + ": more than safe mode takes:" + problems + "\n  " + std::string(safe_remedy));
}

} // namespace

const Variant& Bundle::variant(std::string_view name) const {
    std::string known;
    for (const Variant& variant : manifest.variants) {
        if (variant.name == name) return variant;
        known += (known.empty() ? "" : ", ") + variant.name;
    }
    throw BundleError(path.string() + ": no variant `" + std::string(name) + "` (there are: " + known + ")");
}

Bundle open_bundle(const fs::path& path, Verify how, bool safe) {
    const fs::path file = path / "manifest.json";
    std::error_code error;
    if (!fs::is_regular_file(file, error)) {
        const std::string what = fs::is_directory(path, error) ? "not a bundle: it has no manifest.json" : "no such bundle";
        throw BundleError(path.string() + ": " + what + "; make one with `mars-export onnx CHECKPOINT -o " + path.string() + "`");
    }
    auto held = std::make_shared<Held>(path);
    Read read = read_manifest(*held);
    for (int attempt = 1;; ++attempt) {
        Manifest manifest = parse_manifest(read.text, file.string());
        if (!read.is_vouched_for)
            throw BundleError(path.string() + ": manifest.json does not match manifest.sha256; copy or export the bundle again");
        if (safe) check_sizes(manifest, read.text.size(), path.string());
        try {
            verify(*held, manifest, how, safe);
            return Bundle{path, std::move(manifest), std::move(held)};
        } catch (const BundleError&) { // a writer may have taken a file away meanwhile, with what lists it, or the whole directory
            auto now = std::make_shared<Held>(path);
            Read again = read_manifest(*now);
            if ((again.text == read.text && now->is_same(*held)) || attempt == most_attempts) throw;
            held = std::move(now);
            read = std::move(again);
        }
    }
}

} // namespace mars
