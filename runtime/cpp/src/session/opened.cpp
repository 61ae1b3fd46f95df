#include "session/opened.hpp"

#include <algorithm>
#include <functional>
#include <future>
#include <new>
#include <tuple>

#include "accept.hpp"
#include "bundle/files.hpp"
#include "device/name.hpp"
#include "device/ort/backend.hpp"
#include "device/ort/cuda_backend.hpp"
#include "device/variants.hpp"
#include "joined.hpp"
#include "log.hpp"
#include "machine.hpp"
#include "structured/constrained_sequence.hpp"
#include "text/utf8.hpp"

namespace mars {

namespace {

constexpr const char *too_long = "context_length_exceeded", *unsupported = "unsupported_by_model"; // codes of errors
constexpr std::int64_t characters_per_token = 32, always_taken = 65'536;                           // longer texts are not tokenized
constexpr std::size_t max_openings = 16;                  // system messages whose tokens are remembered
constexpr std::int64_t cache_share = 16;                  // the prefix cache gets this fraction of the free memory,
constexpr std::int64_t max_cache = std::int64_t{1} << 30; // but at most this many bytes

/// Default size of the prefix cache.
std::int64_t share(const Backend& backend) {
    return std::clamp(backend.free_memory().value_or(0) / cache_share, std::int64_t{0}, max_cache);
}

std::optional<Text> text_of(const Bundle& bundle, bool parse_special) {
    if (!bundle.manifest.text) return std::nullopt;
    const TextInfo& info = *bundle.manifest.text;
    const std::filesystem::path file = bundle.path / info.tokenizer;
    const std::optional<std::string> json = read_file(file);
    if (!json) throw BundleError(file.string() + ": not readable; copy or export the bundle again");
    ChatTurns turns = ChatTurns::from_json(info.chat.value_or("null"));
    if (info.thinking) std::tie(turns.on, turns.off) = std::tie(info.thinking->on, info.thinking->off);
    return Text{Tokenizer::from_json(*json, file.string(), info.control_tokens), std::move(turns), parse_special};
}

void check_safe(const Bundle& bundle, const Variant& variant) {
    if (variant.is_engine())
        throw SessionError(bundle.path.string() + ": variant " + variant.name +
                           " is a TensorRT engine, which can run any code: safe mode runs ONNX graphs only; " + std::string(safe_remedy));
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
    const bool is_recurrent = bundle.manifest.model.recurrent.has_value();
    if (is_recurrent && device.kind != "cpu")
        throw SessionError(bundle.path.string() + ": the model's recurrent layers run on a CPU only; give --device cpu", unsupported);
    const Variant& chosen = options.variant ? choose_named(bundle, *options.variant, options.device) : choose(bundle, options.device);
    const std::string name = chosen.name;
    if (options.safe) check_safe(bundle, chosen);
    if (chosen.is_engine() && !options.options.empty())
        throw SessionError("variant " + name + " is an engine: options are for ONNX Runtime");
    if (device.kind != "cuda" && options.cuda_stream != nullptr)
        throw SessionError("a CUDA stream is for the device cuda, not " + options.device.substr(0, 60));
    const OrtSettings settings{options.threads, options.options, options.on_log, options.cuda_stream};
    auto reading = std::async(std::launch::async, text_of, std::cref(bundle), options.parse_special); // takes as long as the graph
    std::unique_ptr<Backend> backend;
    if (chosen.is_engine())
        backend = open_engine(bundle, chosen, {device.ordinal(), options.cuda_stream, options.on_log});
    else if (device.kind == "cuda")
        backend = std::make_unique<CudaBackend>(bundle, chosen, options.device, settings);
    else
        backend = std::make_unique<OrtBackend>(bundle, chosen, options.device, settings);
    std::optional<Text> text;
    std::string text_problem;
    try {
        text = reading.get();
    } catch (const BundleError& error) { // thrown when text is needed; token ids work without it
        text_problem = error.what();
    }
    Opened opened{std::move(bundle), std::move(backend), std::move(text), std::string(name), device.text(), std::move(text_problem)};
    opened.prefixes = std::make_unique<PrefixCache>(options.cache_bytes ? *options.cache_bytes : share(*opened.backend),
                                                    opened.backend->reproducible_slots(), is_recurrent);
    opened.learned_cost = std::make_unique<LearnedCost>(built_in_cost(opened.runs().precision, device.kind == "cpu"));
    return opened;
}

} // namespace

Session Opened::over(Bundle bundle, std::unique_ptr<Backend> backend, std::optional<Text> text, std::int64_t cache_bytes) {
    Opened opened{std::move(bundle), std::move(backend), std::move(text), "", "", ""};
    opened.variant = opened.bundle.manifest.variants.front().name;
    opened.prefixes = std::make_unique<PrefixCache>(cache_bytes, opened.backend->reproducible_slots());
    return Session(std::make_shared<Opened>(std::move(opened)));
}

Session Session::open(const std::filesystem::path& path, const Options& options) try {
    if (options.prefill_tokens < 1) throw SessionError("prefill_tokens must be 1 or more, not " + std::to_string(options.prefill_tokens));
    if (options.cache_bytes && *options.cache_bytes < 0)
        throw SessionError("cache_bytes must be 0 or more, not " + std::to_string(*options.cache_bytes));
    Opened opened = opened_here(open_bundle(path, options.verify, options.safe), options);
    opened.prefill_tokens = options.prefill_tokens;
    note(options.on_log, LogLevel::info, path.string() + ": variant " + opened.variant + " on " + options.device);
    if (!opened.text_problem.empty()) note(options.on_log, LogLevel::warning, opened.text_problem);
    return Session(std::make_shared<Opened>(std::move(opened)));
} catch (const std::bad_alloc&) {
    throw MemoryError(path.string() + ": not enough memory to open this bundle; use a model of fewer or smaller weights, or free memory");
}

GrammarState Opened::new_grammar_state(const GenerationConfig& config) const {
    Matcher matcher = grammars->matcher(bundle, needs_text().tokenizer, config.grammar);
    const bool has_logits = is_one_of("logits", backend->outputs());
    if (!has_logits && !is_one_of("topk_ids", backend->outputs()) && leaves_a_choice(matcher))
        throw SessionError("a grammar needs a bundle with logits or with --top-k 16: where the likeliest token is not allowed, "
                           "another must be chosen",
                           unsupported, "grammar");
    return {std::move(matcher), config.eos_ids.value_or(bundle.manifest.tokens.eos), has_logits, bundle.manifest.block - 1};
}

std::shared_ptr<PrefixHandle> Opened::new_prefix_handle(const Prompt& prompt, const Ids& ids, const std::string& salt,
                                                        const std::optional<std::string>& system) const {
    const std::string* opening = system ? &*system : nullptr;
    if (const auto* messages = prompt.messages(); messages && !messages->empty() && messages->front().role == "system")
        opening = &messages->front().content;
    if (prefixes->budget <= 0 || !text || opening == nullptr) return prefixes->handle(salt);
    return prefixes->handle(salt, {openings->length(*text, *opening, ids)});
}

std::int64_t Openings::length(const Text& text, const std::string& system, const Ids& ids) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto at = known_.find(system);
    if (at == known_.end()) {
        if (known_.size() >= max_openings) known_.clear();
        at = known_.emplace(system, Ids()).first;
        try { // a prompt that shares only its system message with others
            at->second = text.encode({{"system", system}, {"user", ""}});
        } catch (const SessionError&) { // a template may refuse this prompt
        }
    }
    return num_common(at->second, ids);
}

const Text& Opened::needs_text() const {
    if (!text && !text_problem.empty()) throw BundleError(text_problem + "\n  token ids work without it");
    if (!text) throw SessionError(bundle.path.string() + ": this bundle has no tokenizer; pass token ids instead of text");
    return *text;
}

NewSequence Opened::new_sequence(std::int64_t index, const Prompt& prompt, const GenerationConfig& config,
                                 std::chrono::steady_clock::time_point began, const std::optional<std::string>& system,
                                 std::optional<std::int64_t> most) const try {
    check(config);
    NewSequence request;
    std::function<bool(std::int64_t)> stop;
    if (text) {
        const bool may_think = !config.stop.empty() && config.grammar.empty();
        request.text = std::make_unique<TextStream>(*text, config.stop, may_think ? thinking_stream(prompt) : std::nullopt);
        stop = [own = request.text.get()](std::int64_t token) { return own->push(token); };
    }
    const Ids ids = encode(prompt, most);
    const std::vector<std::int64_t>& eos = bundle.manifest.tokens.eos;
    if (config.grammar.empty())
        request.seq = std::make_unique<Sequence>(index, ids, config, eos, std::move(stop), acceptance_rates);
    else
        request.seq =
            std::make_unique<ConstrainedSequence>(index, ids, config, eos, new_grammar_state(config), std::move(stop), acceptance_rates);
    request.seq->mask_limit = bundle.manifest.masks;
    request.seq->stats.began = began;
    request.seq->prefix_handle = new_prefix_handle(prompt, ids, config.cache_salt, system);
    return request;
} catch (const std::bad_alloc&) {
    throw MemoryError("not enough memory to take this request in; shorten the prompt, or free memory");
}

std::optional<ThinkingStream> Opened::thinking_stream(const Prompt& prompt) const {
    const std::optional<TextInfo>& info = bundle.manifest.text;
    if (prompt.messages() == nullptr || !info || !info->thinking) return std::nullopt;
    const std::string rendered = needs_text().chat.render(*prompt.messages(), prompt.thinking()).text;
    const std::string_view said = utf8::right_stripped(rendered);
    const std::string& open = info->thinking->open;
    const bool is_open = said.size() >= open.size() && said.substr(said.size() - open.size()) == open;
    return ThinkingStream(open, info->thinking->close, is_open);
}

std::vector<std::int64_t> Opened::encode(const Prompt& prompt, std::optional<std::int64_t> wanted) const {
    std::vector<std::int64_t> ids;
    if (const auto* given = prompt.token_ids()) {
        ids = *given;
    } else if (const auto* messages = prompt.messages()) {
        std::int64_t characters = 0;
        for (const Message& each : *messages) characters += utf8::length(each.content);
        needs_text();
        measure(characters, wanted);
        ids = text->encode(*messages, prompt.thinking());
    } else {
        needs_text();
        measure(utf8::length(*prompt.text()), wanted);
        ids = text->encode(*prompt.text());
    }
    if (ids.empty()) throw SessionError("the prompt is empty; it needs at least one token", "invalid_value", "prompt");
    const std::int64_t context = backend->max_capacity(), most = std::min(context, wanted.value_or(context));
    if (static_cast<std::int64_t>(ids.size()) > most)
        throw SessionError(
            "the prompt has " + std::to_string(ids.size()) + " tokens, " +
                (most == context ? "this bundle's context holds " + std::to_string(most) : std::to_string(most) + " are allowed here") +
                "; shorten the prompt",
            too_long, "prompt");
    const std::int64_t vocab_size = bundle.manifest.model.vocab_size;
    std::string outside;
    int count = 0;
    for (const std::int64_t id : ids)
        if ((id < 0 || id >= vocab_size) && count++ < 5) outside += (outside.empty() ? "" : ", ") + std::to_string(id);
    if (!outside.empty()) throw SessionError("token ids outside the vocabulary of " + std::to_string(vocab_size) + ": " + outside);
    const std::optional<std::int64_t> mask = bundle.manifest.tokens.mask;
    if (mask && is_one_of(*mask, ids))
        throw SessionError("the prompt holds the mask token " + std::to_string(*mask) +
                           ", which stands for a token that is not known yet; leave it out");
    return ids;
}

void Opened::measure(std::int64_t characters, std::optional<std::int64_t> wanted) const {
    const std::int64_t context = backend->max_capacity(), most = std::min(context, wanted.value_or(context));
    const std::int64_t taken = std::max(always_taken, characters_per_token * most);
    if (characters > taken)
        throw SessionError("the prompt has " + std::to_string(characters) + " characters, " +
                               (most == context ? "this bundle's context holds" : "this request may have") + " at most " +
                               std::to_string(taken) + "; shorten it",
                           too_long, "prompt");
}

void Opened::check(const GenerationConfig& config) const {
    config.check();
    if (!bundle.manifest.tokens.mask && !config.is_exact() && !config.one_token())
        throw SessionError("a tau needs masks, and this bundle was exported without masks: leave tau out to use exact mode "
                           "(there, an MTP layer or prompt_lookup gives several tokens a step)",
                           unsupported, "tau");
    if (config.metric != Metric::probability && !is_one_of(to_string(config.metric), backend->outputs()))
        throw SessionError("the metric " + std::string(to_string(config.metric)) + " needs a bundle exported with --metrics", unsupported,
                           "metric");
    if (config.needs_logits() && !is_one_of("logits", backend->outputs()))
        throw SessionError("temperature and repetition_penalty need a bundle with logits: export it without --no-logits", unsupported,
                           config.is_greedy() ? "repetition_penalty" : "temperature");
    if (!config.stop.empty() && !text && text_problem.empty())
        throw SessionError("stop strings need a bundle with a tokenizer", unsupported, "stop");
    if (!config.stop.empty()) needs_text();
    if (!config.grammar.empty() && !text && text_problem.empty())
        throw SessionError("a grammar needs a bundle with a tokenizer", unsupported, "grammar");
    if (!config.grammar.empty()) needs_text();
}

} // namespace mars
