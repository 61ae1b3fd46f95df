// Opening a bundle: the variant that runs here, its text and its caches.
#include <algorithm>
#include <new>

#include "bundle/files.hpp"
#include "device/name.hpp"
#include "device/ort/backend.hpp"
#include "device/variants.hpp"
#include "log.hpp"
#include "machine.hpp"
#include "session/opened.hpp"

namespace mars {

namespace {

constexpr std::int64_t cache_share = 16;                   // the prefix cache gets this fraction of the free memory,
constexpr std::int64_t most_cache = std::int64_t{1} << 30; // but at most this many bytes

/// Default size of the prefix cache.
std::int64_t share(const Backend& backend) {
    return std::clamp(backend.free_memory().value_or(0) / cache_share, std::int64_t{0}, most_cache);
}

std::optional<Text> text_of(const Bundle& bundle, bool parse_special) {
    if (!bundle.manifest.text) return std::nullopt;
    const TextInfo& info = *bundle.manifest.text;
    const std::filesystem::path file = bundle.path / info.tokenizer;
    const std::optional<std::string> json = read_file(file);
    if (!json) throw BundleError(file.string() + ": not readable; copy or export the bundle again");
    ChatTurns turns = ChatTurns::from_json(info.chat.value_or("null"));
    if (info.thinking) turns.set_thinking(info.thinking->on, info.thinking->off);
    return Text(Tokenizer::from_json(*json, file.string()), std::move(turns), parse_special);
}

void check_safe(const Bundle& bundle, const Variant& variant) {
    if (variant.is_engine())
        throw SessionError(bundle.path.string() + ": variant " + variant.name +
                           " is a TensorRT engine, which is machine code in effect: safe mode runs ONNX graphs only; " +
                           std::string(safe_remedy));
    double num_bytes = 0.0;
    for (const FileEntry& entry : bundle.manifest.files) num_bytes += static_cast<double>(entry.size);
    const std::optional<std::int64_t> free = available_memory();
    if (free && num_bytes > static_cast<double>(*free))
        throw SessionError(bundle.path.string() + ": its files are larger than the free memory: safe mode takes no more; " +
                           std::string(safe_remedy));
}

/// Choose and load the variant that runs here.
Opened opened_here(Bundle bundle, const Session::Options& options) {
    const DeviceName device = DeviceName::of(options.device);
    const Variant& chosen = options.variant ? choose_named(bundle, *options.variant, options.device) : choose(bundle, options.device);
    const std::string name = chosen.name;
    if (options.safe) check_safe(bundle, chosen);
    if (chosen.is_engine() && !options.options.empty())
        throw SessionError("variant " + name + " is an engine: options are for ONNX Runtime");
    if (device.kind != "cuda" && (options.cuda_stream != nullptr || options.cuda_priority != 0))
        throw SessionError("a CUDA stream and its priority are for the device cuda, not " + options.device.substr(0, 60));
    if (!chosen.is_engine() && options.cuda_priority != 0)
        throw SessionError("variant " + name + " is a graph: ONNX Runtime's stream has no priority; give cuda_stream, or run an engine");
    std::unique_ptr<Backend> backend;
    if (chosen.is_engine())
        backend = open_engine(bundle, chosen, {device.ordinal(), options.cuda_stream, options.cuda_priority, options.on_log});
    else
        backend = std::make_unique<OrtBackend>(
            bundle, chosen, options.device,
            OrtSettings{options.threads, options.options, options.on_log, options.strict, options.cuda_stream});
    Opened opened{std::move(bundle), std::move(backend), std::nullopt, std::string(name), device.text(), ""};
    opened.prefixes =
        std::make_unique<Prefixes>(options.cache_bytes ? *options.cache_bytes : share(*opened.backend), opened.backend->firm_slots());
    opened.costs =
        std::make_unique<Costs>(cost_file(opened.bundle, opened.bundle.variant(name), opened.device, options.threads, options.options));
    try {
        opened.text = text_of(opened.bundle, options.parse_special);
    } catch (const BundleError& error) { // thrown when text is needed; token ids work without it
        opened.text_problem = error.what();
    }
    return opened;
}

} // namespace

Session Opened::over(Bundle bundle, std::unique_ptr<Backend> backend, std::optional<Text> text, std::int64_t cache_bytes) {
    Opened opened{std::move(bundle), std::move(backend), std::move(text), "", "", ""};
    opened.variant = opened.bundle.manifest.variants.front().name;
    opened.prefixes = std::make_unique<Prefixes>(cache_bytes, opened.backend->firm_slots());
    return Session(std::make_shared<Opened>(std::move(opened)));
}

Session Session::open(const std::filesystem::path& path, const Options& options) try {
    if (options.cache_bytes && *options.cache_bytes < 0)
        throw SessionError("cache_bytes must be 0 or more, not " + std::to_string(*options.cache_bytes));
    Opened opened = opened_here(open_bundle(path, options.verify, options.safe), options);
    note(options.on_log, LogLevel::info, path.string() + ": variant " + opened.variant + " on " + options.device);
    if (!opened.text_problem.empty()) note(options.on_log, LogLevel::warning, opened.text_problem);
    return Session(std::make_shared<Opened>(std::move(opened)));
} catch (const std::bad_alloc&) {
    throw MemoryError(path.string() + ": not enough memory to open this bundle; use a model of fewer or smaller weights, or free memory");
}

} // namespace mars
