// runtime/bundle/manifest.py: a bundle's manifest, read and checked. docs/format.md is the specification.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <mars/config.hpp>

namespace mars {

/// The layers of a hybrid that keep a state of each row, in float32, instead of KV entries: `inputs` numbers for each token that the
/// state does not have yet, and for `width` tokens before it.
struct RecurrentInfo {
    std::vector<std::int64_t> layers;
    std::int64_t heads = 0, key_dim = 0, value_dim = 0, inputs = 0, width = 0;

    /// Shapes of the tensors that a row keeps between steps of at most `outputs` outputs, by name suffix.
    std::map<std::string, std::vector<std::int64_t>> shapes(std::int64_t outputs) const {
        std::map<std::string, std::vector<std::int64_t>> shapes;
        for (const std::int64_t i : layers) {
            shapes[std::to_string(i) + ".inputs"] = {width + outputs, inputs};
            shapes[std::to_string(i) + ".state"] = {heads, key_dim, value_dim};
        }
        return shapes;
    }

    /// The size of that, in bytes: numbers of an untrusted manifest may be large.
    double state_bytes(std::int64_t outputs) const {
        double num_bytes = 0;
        for (const auto& [suffix, shape] : shapes(outputs)) {
            double size = sizeof(float);
            for (const std::int64_t extent : shape) size *= static_cast<double>(extent);
            num_bytes += size;
        }
        return num_bytes;
    }
};

/// Dimensions that a runtime needs to allocate KV buffers and check token ids. `mtp_drafts`: draft tokens of the model's
/// MTP layer in each step, 0 without such a layer, which is the last one with KV entries. `recurrent`: the layers without KV entries, no value if there
/// are none.
struct ModelInfo {
    std::int64_t vocab_size = 0, num_layers = 0, num_kv_heads = 0, head_dim = 0, context_length = 0, mtp_drafts = 0;
    std::optional<RecurrentInfo> recurrent = {};

    /// Layers with KV entries.
    std::vector<std::int64_t> kv_layers() const {
        std::vector<std::int64_t> layers;
        for (std::int64_t i = 0; i < num_layers + (mtp_drafts > 0 ? 1 : 0); ++i)
            if (!recurrent || std::count(recurrent->layers.begin(), recurrent->layers.end(), i) == 0) layers.push_back(i);
        return layers;
    }

    /// The heads of a row of KV entries (one in the layout "cuda") and the numbers of each in an entry, with its float16 scale.
    std::pair<std::int64_t, std::int64_t> entry_shape(const std::string& kv_dtype, const std::string& kv_layout) const {
        const std::int64_t width = head_dim + (kv_dtype == "int8" ? 2 : 0);
        return kv_layout == "cuda" ? std::pair{std::int64_t{1}, num_kv_heads * width} : std::pair{num_kv_heads, width};
    }

    /// `0.key`, `0.value`, `1.key`, ...
    std::vector<std::string> kv_suffixes() const {
        std::vector<std::string> suffixes;
        for (const std::int64_t i : kv_layers())
            for (const char* kind : {".key", ".value"}) suffixes.push_back(std::to_string(i) + kind);
        return suffixes;
    }
};

/// Special token ids. A model without a mask token may predict every token.
struct TokenInfo {
    std::optional<std::int64_t> mask;
    std::vector<std::int64_t> eos;
    std::int64_t pad = 0;
};

/// The texts around the thinking at the beginning of an answer. `on`, `off`: what follows the last message, by its role,
/// with `enable_thinking` true and false; no value if the turns do not express it.
struct ThinkingInfo {
    std::string open, close;
    std::optional<std::map<std::string, std::string>> on, off;
};

/// How text becomes token ids. `tokenizer` is a file of the bundle, `chat` is JSON for ChatTurns. `control_tokens` are
/// plain text in messages although the tokenizer does not mark them as special.
struct TextInfo {
    std::string tokenizer;
    std::optional<std::string> chat;
    std::optional<ThinkingInfo> thinking;
    std::vector<std::string> control_tokens = {};
};

/// The values that one dimension may have, and the one the engine was optimized for.
struct Extent {
    std::int64_t min = 1, opt = 1, max = 1;

    bool holds(std::int64_t value) const { return min <= value && value <= max; }
};

/// Shapes that an engine accepts: one TensorRT optimization profile (a `Profile` here is a calibrated tau).
struct ShapeRange {
    std::string name;
    Extent batch, slots, outputs;
};

/// How an engine was built.
///
/// `version`: TensorRT's. `cuda`: the CUDA major version of its libraries. `platform` such as `linux-x86_64`.
/// `compute_capabilities`: the GPUs it runs on, such as `sm86`; `portable`: those that TensorRT-RTX accepts.
/// `ranges` in the order of its optimization profiles. `graph`: the bundle's ONNX file it was built from.
struct EngineInfo {
    std::string version, cuda, platform;
    std::vector<std::string> compute_capabilities;
    std::vector<ShapeRange> ranges;
    std::string graph;

    /// Index of the first range that accepts this shape, or no value.
    std::optional<std::size_t> range_for(std::int64_t rows, std::int64_t slots, std::int64_t outputs) const;

    std::int64_t max_rows() const { return largest(&ShapeRange::batch); }
    std::int64_t max_slots() const { return largest(&ShapeRange::slots); }
    std::int64_t max_outputs() const { return largest(&ShapeRange::outputs); }

  private:
    std::int64_t largest(Extent ShapeRange::* dimension) const;
};

/// One executable form of the model. `batch`, `slots` and `capacity` have no value if they are symbolic in the graph.
struct Variant {
    std::string name, backend, file;
    std::optional<std::string> weights;
    std::string precision, kv_dtype, kv_layout;
    std::vector<std::string> outputs;
    std::optional<std::int64_t> batch, slots, capacity;
    std::optional<EngineInfo> engine;
    std::optional<std::int64_t> accuracy_level; ///< of ONNX Runtime's products with int4 and int8 weights: 0 exact, 4 fast

    bool is_static() const { return slots.has_value(); }
    bool is_engine() const { return backend != "onnx"; }
    /// Whether activations are quantized too, so that products are of integers.
    bool is_integer() const { return precision == "w8a8" || precision == "w4a8"; }
};

/// One file of a bundle. `path` is a plain name, `size` in bytes, `sha256` in lower-case hex.
struct FileEntry {
    std::string path;
    std::int64_t size = 0;
    std::string sha256;
};

/// A calibrated tau for a task. `variant_sha256` is the hash of the graph it was measured on.
struct Profile {
    std::string name;
    double tau = 0;
    Metric metric = Metric::probability;
    std::int64_t masks = all_masks;
    std::string variant, variant_sha256;
    std::optional<std::string> weights_sha256, precision; ///< of what it was measured on; no value: unknown
    std::optional<std::int64_t> accuracy_level = std::nullopt;
};

/// A grammar as an automaton over bytes in `file`.
struct StoredGrammar {
    std::string name, file;
};

/// The facts about a bundle that are needed before a graph is opened.
struct Manifest {
    ModelInfo model;
    std::int64_t block = 0;
    TokenInfo tokens;
    std::optional<TextInfo> text;
    std::vector<Variant> variants;
    std::vector<FileEntry> files;
    std::vector<Profile> profiles;
    std::vector<StoredGrammar> grammars = {};
    std::optional<std::int64_t> masks = {}; ///< the most masks of a step; no value for the block's

    /// The input of a slot without a token: the mask, or any id if no step has masks.
    std::int64_t mask_id() const { return tokens.mask.value_or(tokens.pad); }
};

/// An opened bundle: a directory with a valid manifest and exactly the files it lists.
struct Bundle {
    std::filesystem::path path;
    Manifest manifest;

    /// The variant of that name. Throws BundleError that lists the existing names.
    const Variant& variant(std::string_view name) const;
};

/// Open and check a bundle directory. `how` says which files are hashed. `safe` is for bundles of unknown origin: it
/// hashes everything, remembers nothing, and has stricter limits (docs/security.md).
///
/// Throws BundleError with everything that is wrong: not a bundle, a newer format, an invalid manifest, unsafe file
/// names, files that are missing, not listed, or of the wrong size or content.
Bundle open_bundle(const std::filesystem::path& path, Verify how = Verify::once, bool safe = false);

/// Parse and check manifest text. Throws BundleError that lists every wrong field.
Manifest parse_manifest(std::string_view text, const std::string& where = "manifest.json");

} // namespace mars
