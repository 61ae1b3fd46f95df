// The file of a stored prefix: token ids, then their KV entries (docs/format.md), mapped into memory. Knows no session.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "bundle/bundle.hpp"
#include "decode/backend.hpp"

namespace mars {

struct PrefixFile {
    std::vector<std::int64_t> ids;
    HostEntries entries;
};

/// Nothing where the file is gone: it was taken out of the bundle since that was opened. Throws BundleError for a file of another size, and
/// for ids outside the vocabulary.
std::optional<PrefixFile> read_prefix(const std::filesystem::path& directory, const StoredPrefix& prefix, const ModelInfo& model);

/// Bytes of a file of `length` entries; nothing where no file is as large.
std::optional<std::int64_t> prefix_size(const ModelInfo& model, const std::string& kv_dtype, std::int64_t length);

/// Whether a prefix was made for what runs; one for another variant or device is not stale, only not meant.
bool is_for(const StoredPrefix& prefix, const Variant& variant, const std::string& device);

/// Why a prefix does not hold what `variant` would compute; empty for a good one.
std::vector<std::string> staleness(const Manifest& manifest, const Variant& variant, const StoredPrefix& prefix);

} // namespace mars
