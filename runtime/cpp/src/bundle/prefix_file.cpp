// A mapping that is as long as the manifest says, or none.
#include "bundle/prefix_file.hpp"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <mars/errors.hpp>

#include "bundle/profiles.hpp"

namespace mars {

namespace {

constexpr std::int64_t alignment = 64, id_size = 4; // bytes

std::int64_t ids_size(std::int64_t length) { return (id_size * length + alignment - 1) / alignment * alignment; }

std::string level_text(const std::optional<std::int64_t>& level) { return level ? std::to_string(*level) : "-"; }

} // namespace

std::optional<std::int64_t> prefix_size(const ModelInfo& model, const std::string& kv_dtype, std::int64_t length) {
    std::int64_t size = kv_dtype == "float32" ? 4 : 2;
    for (const std::int64_t factor : {std::int64_t{2}, model.num_layers, model.num_kv_heads, model.head_dim, length})
        if (__builtin_mul_overflow(size, factor, &size)) return std::nullopt;
    return __builtin_add_overflow(size, ids_size(length), &size) ? std::nullopt : std::optional(size);
}

bool is_for(const StoredPrefix& prefix, const Variant& variant, const std::string& device) {
    return prefix.variant == variant.name && prefix.device == device;
}

std::vector<std::string> staleness(const Manifest& manifest, const Variant& variant, const StoredPrefix& prefix) {
    std::vector<std::string> reasons;
    if (prefix.variant_sha256 != sha256_of(manifest, variant.file)) reasons.push_back(variant.file + " is not the one that computed it");
    if (prefix.weights_sha256 != sha256_of(manifest, variant.weights)) reasons.emplace_back("the weights are not those that computed it");
    const auto compare = [&](const char* what, const std::string& had, const std::string& has) {
        if (had != has) reasons.push_back(std::string("its ") + what + " is " + had + ", " + has + " is running");
    };
    compare("precision", prefix.precision, variant.precision);
    compare("kv dtype", prefix.kv_dtype, variant.kv_dtype);
    compare("kv layout", prefix.kv_layout, variant.kv_layout);
    compare("accuracy level", level_text(prefix.accuracy_level), level_text(variant.accuracy_level));
    return reasons;
}

std::optional<PrefixFile> read_prefix(const std::filesystem::path& directory, const StoredPrefix& prefix, const ModelInfo& model) {
    const std::filesystem::path path = directory / prefix.file;
    const auto fail = [&](const std::string& what) { throw BundleError(path.string() + ": " + what); };
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0 && errno == ENOENT) return std::nullopt;
    if (file < 0) fail(std::string("cannot be opened (") + std::strerror(errno) + ")");
    struct stat state{};
    const bool is_plain = fstat(file, &state) == 0 && S_ISREG(state.st_mode);
    const std::optional<std::int64_t> size = prefix_size(model, prefix.kv_dtype, prefix.length);
    void* whole = MAP_FAILED;
    if (is_plain && size && state.st_size == *size) whole = mmap(nullptr, static_cast<std::size_t>(*size), PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (!is_plain || !size || state.st_size != *size)
        fail(std::to_string(state.st_size) + " bytes are not " + std::to_string(prefix.length) + " tokens of this model");
    if (whole == MAP_FAILED) fail("cannot be mapped into memory");
    const auto num_bytes = static_cast<std::size_t>(*size);
    const std::shared_ptr<const void> owner(whole, [num_bytes](void* mapped) { munmap(mapped, num_bytes); });
    const auto* bytes = static_cast<const unsigned char*>(whole);
    PrefixFile found{{}, {owner, bytes + ids_size(prefix.length), prefix.length}};
    for (std::int64_t i = 0; i < prefix.length; ++i) {
        const unsigned char* id = bytes + id_size * i;
        found.ids.push_back(std::int64_t{id[0]} | std::int64_t{id[1]} << 8 | std::int64_t{id[2]} << 16 | std::int64_t{id[3]} << 24);
        if (found.ids.back() >= model.vocab_size)
            fail("token id " + std::to_string(found.ids.back()) + " is outside the vocabulary of " + std::to_string(model.vocab_size));
    }
    return found;
}

} // namespace mars
