// Opening a bundle directory: manifest, checksum, files.
#include <algorithm>

#include <mars/errors.hpp>

#include "bundle/bundle.hpp"
#include "bundle/files.hpp"
#include "bundle/sha256.hpp"

namespace mars {

namespace fs = std::filesystem;

namespace {

constexpr std::uintmax_t manifest_limit = 16000000; // bytes

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

} // namespace

const Variant& Bundle::variant(std::string_view name) const {
    std::string known;
    for (const Variant& variant : manifest.variants) {
        if (variant.name == name) return variant;
        known += (known.empty() ? "" : ", ") + variant.name;
    }
    throw BundleError(path.string() + ": no variant `" + std::string(name) + "` (there are: " + known + ")");
}

Bundle open_bundle(const fs::path& path, bool full) {
    const fs::path file = path / "manifest.json";
    std::error_code error;
    if (!fs::is_regular_file(file, error)) {
        const std::string what = fs::is_directory(path, error) ? "not a bundle: it has no manifest.json" : "no such bundle";
        throw BundleError(path.string() + ": " + what + "; make one with `mars-export onnx CHECKPOINT -o " + path.string() + "`");
    }
    const std::uintmax_t size = fs::file_size(file, error);
    if (!error && size > manifest_limit)
        throw BundleError(file.string() + ": larger than " + std::to_string(manifest_limit) + " bytes; this is not a manifest");
    const std::optional<std::string> text = read_file(file);
    if (!text) throw BundleError(file.string() + ": not readable");
    Bundle bundle{path, parse_manifest(*text, file.string())};
    if (!is_vouched_for(read_file(path / "manifest.sha256").value_or(""), *text))
        throw BundleError(path.string() + ": manifest.json does not match manifest.sha256; copy or export the bundle again");
    verify(path, bundle.manifest.files, full);
    return bundle;
}

} // namespace mars
