// runtime/bundle/manifest.py: reads and checks manifest.json.
#include <algorithm>
#include <limits>
#include <set>

#include <mars/errors.hpp>

#include "bundle/bundle.hpp"
#include "bundle/fields.hpp"
#include "bundle/files.hpp"
#include "joined.hpp"

namespace mars {

namespace {

using Json = nlohmann::json;

// Entries of lists (docs/format.md).
constexpr std::size_t max_outputs_of_range = 16, most_variants = 64, most_files = 1000, most_profiles = 10000, most_grammars = 256,
                      most_ranges = 64;
constexpr std::size_t most_control_tokens = 100'000;
constexpr std::int64_t max_extent = std::int64_t{1} << 20;

/// Throws BundleError for another major version.
void check_version(const Json& top, const std::string& where) {
    const auto at = top.is_object() ? top.find("format_version") : top.end();
    const std::string version = top.is_object() && at != top.end() && at->is_string() ? at->get<std::string>() : "";
    std::string major = version.substr(0, version.find('.'));
    if (major.empty() || major.find_first_not_of("0123456789") != std::string::npos)
        throw BundleError(where + ": no `format_version`; this is not a mars-export bundle");
    major.erase(0, std::min(major.find_first_not_of('0'), major.size() - 1));
    if (major == "1") return;
    const std::string side = major == "0" ? "export the bundle again with this mars-export" : "update mars-export";
    throw BundleError(where + ": bundle format " + version.substr(0, 60) + ", this runtime reads 1.x: " + side);
}

RecurrentInfo read_recurrent(Fields fields) {
    constexpr std::int64_t most = 1 << 16;
    RecurrentInfo info;
    info.layers = fields.integers("layers", 1 << 12, 1 << 12);
    info.heads = fields.integer("heads", 1, most);
    info.key_dim = fields.integer("key_dim", 1, most);
    info.value_dim = fields.integer("value_dim", 1, most);
    info.inputs = fields.integer("inputs", 1, 1 << 24);
    info.width = fields.integer("width", 0, 1 << 12);
    return info;
}

ModelInfo read_model(Fields fields) {
    // Upper bounds, because a reader allocates memory from these numbers.
    const std::int64_t one = 1;
    ModelInfo model;
    fields.text("type");
    fields.integer("hidden_size", 1, one << 20);
    const std::int64_t num_heads = fields.integer("num_heads", 1, one << 16);
    model.vocab_size = fields.integer("vocab_size", 1, one << 24);
    model.num_layers = fields.integer("num_layers", 1, one << 12);
    model.num_kv_heads = fields.integer("num_kv_heads", 1, one << 16);
    model.head_dim = fields.integer("head_dim", 1, one << 16);
    model.context_length = fields.integer("context_length", 1, one << 31);
    if (num_heads % model.num_kv_heads != 0)
        fields.wrong("", std::to_string(num_heads) + " heads cannot share " + std::to_string(model.num_kv_heads) + " key/value heads");
    if (fields.has("mtp_drafts")) model.mtp_drafts = fields.integer("mtp_drafts", 0, 64);
    fields.optional_integer("mtp_shortlist", 0, one << 24);
    if (fields.has("recurrent")) model.recurrent = read_recurrent(fields.object("recurrent"));
    return model;
}

ThinkingInfo read_thinking(Fields fields) {
    ThinkingInfo info{fields.text("open"), fields.text("close"), std::nullopt, std::nullopt};
    if (fields.has("on")) info.on = fields.named_texts("on");
    if (fields.has("off")) info.off = fields.named_texts("off");
    if (info.open.empty() || info.close.empty()) fields.wrong("", "two non-empty strings are expected");
    return info;
}

TextInfo read_text(Fields fields) {
    std::optional<std::string> chat;
    std::optional<ThinkingInfo> thinking;
    if (fields.has("thinking")) thinking = read_thinking(fields.object("thinking"));
    if (fields.has("chat")) chat = fields.object("chat").dump();
    std::vector<std::string> control_tokens;
    if (fields.has("control_tokens")) control_tokens = fields.texts("control_tokens", most_control_tokens);
    return {fields.text("tokenizer"), chat, thinking, std::move(control_tokens)};
}

Extent read_extent(Fields fields) {
    const Extent extent{fields.integer("min", 1, max_extent), fields.integer("opt", 1, max_extent), fields.integer("max", 1, max_extent)};
    if (extent.min > extent.opt || extent.opt > extent.max)
        fields.wrong("", "min " + std::to_string(extent.min) + ", opt " + std::to_string(extent.opt) + ", max " +
                             std::to_string(extent.max) + " are not in order");
    return extent;
}

EngineInfo read_engine(Fields fields) {
    EngineInfo info;
    for (Fields& range : fields.objects("ranges", most_ranges))
        info.ranges.push_back({range.text("name", {"decode", "prefill"}), read_extent(range.object("batch")),
                               read_extent(range.object("slots")), read_extent(range.object("outputs"))});
    if (info.ranges.empty()) fields.wrong("ranges", "at least one is expected");
    info.version = fields.text("version");
    info.cuda = fields.text("cuda");
    info.platform = fields.text("platform");
    info.compute_capabilities = fields.texts("compute_capabilities");
    info.graph = fields.text("graph");
    return info;
}

Variant read_variant(Fields& fields) {
    static const std::vector<std::string> outputs{"token_ids", "confidence", "margin", "entropy", "topk_ids", "topk_logprobs", "logits"};
    Variant variant;
    variant.outputs = fields.texts("outputs", max_outputs_of_range);
    const auto has = [&](const std::string& name) { return std::count(variant.outputs.begin(), variant.outputs.end(), name) > 0; };
    const auto is_known = [&](const std::string& name) { return std::count(outputs.begin(), outputs.end(), name) > 0; };
    if (!has("token_ids") || !has("confidence") || !std::all_of(variant.outputs.begin(), variant.outputs.end(), is_known))
        fields.wrong("outputs", "token_ids and confidence are needed, and known are token_ids, confidence, margin, entropy, topk_ids, "
                                "topk_logprobs, logits");
    else if (has("topk_ids") != has("topk_logprobs"))
        fields.wrong("outputs", "topk_ids and topk_logprobs must both be listed, or neither");
    variant.name = fields.text("name");
    variant.backend = fields.text("backend", {"onnx", "tensorrt", "tensorrt_rtx"});
    variant.file = fields.text("file");
    variant.weights = fields.optional_text("weights");
    variant.precision = fields.text("precision", {"float32", "float16", "bfloat16", "int8", "int4", "w8a8", "w4a8"});
    variant.kv_dtype = fields.text("kv_dtype", {"float32", "float16", "bfloat16", "int8"});
    variant.kv_layout = fields.text("kv_layout", {"in-place", "appended", "cuda"});
    variant.batch = fields.optional_integer("batch", 1);
    variant.slots = fields.optional_integer("slots", 1);
    variant.capacity = fields.optional_integer("capacity", 1);
    const bool is_plain = variant.backend == "onnx" && variant.is_integer() && variant.kv_layout == "in-place";
    if (variant.kv_dtype == "int8" && !is_plain)
        fields.wrong("kv_dtype", "int8 is for w8a8 and w4a8 graphs of ONNX Runtime in the in-place layout");
    if (variant.kv_layout == "cuda" && variant.is_engine()) fields.wrong("kv_layout", "cuda is for graphs of ONNX Runtime");
    if (fields.has("engine")) variant.engine = read_engine(fields.object("engine"));
    variant.accuracy_level = fields.optional_integer("accuracy_level");
    return variant;
}

Profile read_profile(Fields& fields) {
    Profile profile;
    profile.name = fields.text("name");
    profile.tau = fields.number("tau");
    const std::string metric = fields.text("metric", {"probability", "margin", "entropy"});
    profile.metric = metric == "margin" ? Metric::margin : metric == "entropy" ? Metric::entropy : Metric::probability;
    if (fields.has("masks")) profile.masks = fields.masks("masks");
    profile.variant = fields.text("variant");
    profile.variant_sha256 = fields.text("variant_sha256");
    profile.weights_sha256 = fields.optional_text("weights_sha256");
    profile.precision = fields.optional_text("precision");
    profile.accuracy_level = fields.optional_integer("accuracy_level");
    return profile;
}

Manifest read_manifest(Fields& top) {
    Manifest manifest;
    top.text("producer");
    top.text("source");
    manifest.model = read_model(top.object("model"));
    Fields tokens = top.object("tokens");
    const std::int64_t last = manifest.model.vocab_size - 1;
    manifest.block = top.integer("block", 1, 4096);
    manifest.tokens = {tokens.optional_integer("mask", 0, last), tokens.integers("eos", last), tokens.integer("pad", 0, last)};
    if (top.has("text")) manifest.text = read_text(top.object("text"));
    for (Fields& fields : top.objects("variants", most_variants)) manifest.variants.push_back(read_variant(fields));
    for (Fields& fields : top.objects("files", most_files))
        manifest.files.push_back({fields.text("path"), fields.integer("size"), fields.text("sha256")});
    if (top.has("profiles"))
        for (Fields& fields : top.objects("profiles", most_profiles)) manifest.profiles.push_back(read_profile(fields));
    if (top.has("grammars"))
        for (Fields& fields : top.objects("grammars", most_grammars))
            manifest.grammars.push_back({fields.text("name"), fields.text("file")});
    manifest.masks = top.optional_integer("masks", 0, 4096);
    return manifest;
}

std::vector<std::string> contradictions(const Manifest& manifest, const std::string& where) {
    std::vector<std::string> problems;
    const auto quoted = [](const std::string& name) { return "`" + name.substr(0, 80) + "`"; };
    std::set<std::string> listed;
    for (const FileEntry& entry : manifest.files)
        if (!listed.insert(entry.path).second || !is_safe_name(entry.path))
            problems.push_back(where + ".files: " + quoted(entry.path) + " is listed twice, or not a plain file name");
    const auto require = [&](const std::string& file, const std::string& user) {
        if (listed.count(file) == 0) problems.push_back(where + ": " + user + " uses " + quoted(file) + ", which `files` does not list");
    };
    std::set<std::string> variants, grammars;
    for (const Variant& variant : manifest.variants) {
        if (!variants.insert(variant.name).second) problems.push_back(where + ".variants: " + quoted(variant.name) + " is listed twice");
        require(variant.file, "variant " + variant.name);
        if (variant.weights) require(*variant.weights, "variant " + variant.name);
        if (variant.engine) require(variant.engine->graph, "variant " + variant.name);
    }
    if (manifest.text) require(manifest.text->tokenizer, "text");
    for (const StoredGrammar& grammar : manifest.grammars) {
        if (!grammars.insert(grammar.name).second) problems.push_back(where + ".grammars: " + quoted(grammar.name) + " is listed twice");
        require(grammar.file, "grammar " + grammar.name);
    }
    for (const Profile& profile : manifest.profiles)
        if (variants.count(profile.variant) == 0)
            problems.push_back(where + ": profile " + quoted(profile.name) + " is for variant " + quoted(profile.variant) +
                               ", which is missing");
    if (manifest.model.kv_layers().empty())
        problems.push_back(where + ".model.recurrent: every layer is recurrent: some must have KV entries");
    if (manifest.variants.empty()) problems.push_back(where + ".variants: empty: nothing to run");
    const auto& [mask, eos, pad] = manifest.tokens;
    if (!mask && manifest.masks != 0) problems.push_back(where + ".tokens.mask: null is valid only with masks 0");
    if (mask && std::count(eos.begin(), eos.end(), *mask) > 0) problems.push_back(where + ".tokens: the mask token cannot end a sequence");
    return problems;
}

} // namespace

Manifest parse_manifest(std::string_view text, const std::string& where) {
    Json value = parse_json(text, where, true);
    check_version(value, where);
    std::vector<std::string> problems;
    Fields top(&value, where, problems);
    Manifest manifest = read_manifest(top);
    if (problems.empty()) problems = contradictions(manifest, where);
    if (problems.empty()) return manifest;
    fail(problems, "manifest");
}

} // namespace mars
