// Sessions: opening one, and the checks before a request runs.
#include <algorithm>

#include <mars/draft.hpp>
#include <mars/ort.hpp>
#include <mars/session.hpp>

#include "answers.hpp"
#include "bundle/files.hpp"
#include "device/variants.hpp"

namespace mars {

namespace {

std::optional<Text> text_of(const Bundle& bundle) {
    if (!bundle.manifest.text) return std::nullopt;
    const TextInfo& info = *bundle.manifest.text;
    const std::filesystem::path file = bundle.path / info.tokenizer;
    const std::optional<std::string> json = read_file(file);
    if (!json) throw BundleError(file.string() + ": not readable; copy or export the bundle again");
    return Text(Tokenizer::from_json(*json, file.string()), ChatTurns::from_json(info.chat.value_or("null")));
}

/// What token ids mean: a hash of the tokenizer, else the number of tokens.
std::string vocabulary_of(const Manifest& manifest) {
    if (manifest.text)
        for (const FileEntry& entry : manifest.files)
            if (entry.path == manifest.text->tokenizer) return entry.sha256;
    return std::to_string(manifest.model.vocab_size);
}

} // namespace

Session::Session(Bundle bundle, std::unique_ptr<Backend> backend, std::optional<Text> text)
    : Session(std::make_shared<Opened>(Opened{std::move(bundle), std::move(backend), std::move(text), ""})) {}

Session Session::open(const std::filesystem::path& path, const Options& options) {
    Bundle bundle = open_bundle(path, options.verify);
    const Variant& chosen = options.variant ? choose_named(bundle, *options.variant, options.device) : choose(bundle, options.device);
    std::unique_ptr<Backend> backend;
    if (chosen.is_engine())
        backend = open_engine(bundle, chosen);
    else
        backend = std::make_unique<OrtBackend>(bundle, chosen, options.device, options.threads);
    Opened opened{std::move(bundle), std::move(backend), std::nullopt, ""};
    try {
        opened.text = text_of(opened.bundle);
    } catch (const BundleError& error) { // raised where text is asked for; token ids work without it
        opened.text_problem = error.what();
    }
    if (options.draft) {
        opened.draft = open(*options.draft, {options.device, options.threads, std::nullopt, options.verify, std::nullopt}).opened_;
        if (vocabulary_of(opened.bundle.manifest) != vocabulary_of(opened.draft->bundle.manifest))
            throw SessionError(options.draft->string() + ": the draft has another tokenizer than " + path.string() +
                               "; export both from checkpoints of one family");
    }
    return Session(std::make_shared<Opened>(std::move(opened)));
}

Completion Session::generate(const Prompt& prompt, const GenerationConfig& config, const OnEvent& on_event, const Commit& commit) const {
    return std::move(generate_batch({prompt}, {config}, on_event, commit).front());
}

std::vector<Completion> Session::generate_batch(const std::vector<Prompt>& prompts, const std::vector<GenerationConfig>& configs,
                                                const OnEvent& on_event, const Commit& commit) const {
    Stream::Answers answers(opened_, prompts, configs, commit);
    while (const auto events = answers.next())
        for (const Event& event : *events)
            if (on_event && on_event(event)) answers.cancel(event.row);
    return answers.completions();
}

Stream Session::stream(const Prompt& prompt, const GenerationConfig& config, const Commit& commit) const {
    return Stream(std::make_unique<Stream::Answers>(opened_, std::vector{prompt}, std::vector{config}, commit));
}

std::vector<std::int64_t> Session::encode(const Prompt& prompt) const { return opened_->encode(prompt); }

std::string Session::decode(const std::vector<std::int64_t>& token_ids) const { return opened_->needs_text().decode(token_ids); }

bool Session::has_text() const { return opened_->text.has_value(); }

const Bundle& Session::bundle() const { return opened_->bundle; }

std::int64_t Session::max_capacity() const { return opened_->backend->max_capacity(); }

std::unique_ptr<Proposer> Session::Opened::new_draft(const GenerationConfig& config) const {
    if (!draft || !config.is_exact()) return nullptr;
    const Manifest& manifest = draft->bundle.manifest;
    return std::make_unique<Draft>(*draft->backend, manifest.block, manifest.tokens.mask, manifest.tokens.eos);
}

const Text& Session::Opened::needs_text() const {
    if (!text && !text_problem.empty()) throw BundleError(text_problem + "\n  token ids work without it");
    if (!text) throw SessionError(bundle.path.string() + ": this bundle has no tokenizer; pass token ids instead of text");
    return *text;
}

std::vector<std::int64_t> Session::Opened::encode(const Prompt& prompt) const {
    std::vector<std::int64_t> ids;
    if (const auto* given = std::get_if<std::vector<std::int64_t>>(&prompt))
        ids = *given;
    else if (const auto* messages = std::get_if<std::vector<Message>>(&prompt))
        ids = needs_text().encode(*messages);
    else
        ids = needs_text().encode(std::get<std::string>(prompt));
    if (ids.empty()) throw SessionError("the prompt is empty; give at least one token");
    const std::int64_t vocab_size = bundle.manifest.model.vocab_size;
    std::string outside;
    int count = 0;
    for (const std::int64_t id : ids)
        if ((id < 0 || id >= vocab_size) && count++ < 5) outside += (outside.empty() ? "" : ", ") + std::to_string(id);
    if (!outside.empty()) throw SessionError("token ids outside the vocabulary of " + std::to_string(vocab_size) + ": " + outside);
    const std::int64_t most = backend->max_capacity();
    if (static_cast<std::int64_t>(ids.size()) > most)
        throw SessionError("the prompt has " + std::to_string(ids.size()) + " tokens, this bundle's context holds " + std::to_string(most) +
                           "; shorten the prompt");
    return ids;
}

void Session::Opened::check(const GenerationConfig& config) const {
    config.check();
    const auto& outputs = backend->outputs();
    const auto has = [&](std::string_view name) { return std::find(outputs.begin(), outputs.end(), name) != outputs.end(); };
    if (config.metric != Metric::probability && !has(to_string(config.metric)))
        throw SessionError("the metric " + std::string(to_string(config.metric)) + " needs a bundle exported with --metrics");
    if (config.needs_logits() && !has("logits"))
        throw SessionError("temperature and repetition_penalty need a bundle exported with --logits");
    if (!config.stop.empty() && !text && text_problem.empty()) throw SessionError("stop strings need a bundle with a tokenizer");
    if (!config.stop.empty()) needs_text();
}

} // namespace mars
