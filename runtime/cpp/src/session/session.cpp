// runtime/session/session.py: prompts in, answers or streams out.
#include <set>

#include <mars/conversation.hpp>
#include <mars/session.hpp>

#include "bundle/profiles.hpp"
#include "session/answers.hpp"

namespace mars {

Completion Session::generate(const Prompt& prompt, const GenerationConfig& config, const OnEvent& on_event,
                             std::int64_t cache_block) const {
    return std::move(generate_batch({prompt}, {config}, on_event, cache_block).front());
}

std::vector<Completion> Session::generate_batch(const std::vector<Prompt>& prompts, const std::vector<GenerationConfig>& configs,
                                                const OnEvent& on_event, std::int64_t cache_block) const {
    Answers answers(opened_, prompts, configs, cache_block);
    while (const auto events = answers.next())
        for (const Event& event : *events)
            if (on_event && on_event(event)) answers.cancel(event.row);
    return answers.completions();
}

Stream Session::stream(const Prompt& prompt, const GenerationConfig& config, std::int64_t cache_block) const {
    return Stream(std::make_shared<Answers>(opened_, std::vector{prompt}, std::vector{config}, cache_block));
}

Conversation Session::conversation(std::optional<std::string> system, bool drop_oldest) const {
    opened_->needs_text();
    return Conversation(opened_, std::move(system), drop_oldest);
}

void Session::warm_up() const {
    GenerationConfig config;
    config.max_new_tokens = 1;
    generate(std::vector<std::int64_t>{opened_->bundle.manifest.tokens.mask == 0 ? 1 : 0}, config);
}

void Session::set_cost(std::vector<std::pair<std::int64_t, double>> points) const { opened_->learned_cost->fix(Cost(std::move(points))); }
PrefixStats Session::prefix_stats() const { return opened_->prefixes->stats(); }
void Session::forget_prefixes() const { opened_->prefixes->clear(); }
std::vector<std::int64_t> Session::encode(const Prompt& prompt) const { return opened_->encode(prompt); }
std::string Session::decode(const std::vector<std::int64_t>& token_ids) const { return opened_->needs_text().tokenizer.decode(token_ids); }
void Session::check(const GenerationConfig& config) const { opened_->check(config); }
TextStream Session::text_stream() const { return TextStream(opened_->needs_text()); }

std::optional<ThinkingStream> Session::thinking_stream(const Prompt& prompt) const { return opened_->thinking_stream(prompt); }

SessionInfo Session::info() const {
    const Manifest& manifest = opened_->bundle.manifest;
    const Variant& variant = opened_->runs();
    SessionInfo info;
    info.variant = variant.name;
    info.backend = variant.backend;
    info.precision = variant.precision;
    info.device = opened_->device;
    info.outputs = opened_->backend->outputs();
    info.vocab_size = manifest.model.vocab_size;
    info.context_length = opened_->backend->max_capacity();
    info.block = manifest.block;
    info.mask_id = manifest.tokens.mask.value_or(-1);
    info.eos_ids = manifest.tokens.eos;
    info.has_text = opened_->text.has_value();
    info.has_thinking = info.has_text && manifest.text->thinking;
    info.switches_thinking = info.has_text && opened_->needs_text().chat.switches_thinking();
    if (variant.engine) info.max_rows = variant.engine->max_rows();
    std::set<std::string> names; // variants may have profiles of the same name
    for (const Profile& profile : manifest.profiles) {
        try {
            config_of_profile(profile.name);
            names.insert(profile.name);
        } catch (const SessionError&) { // stale, or of another variant
        }
    }
    info.profiles.assign(names.begin(), names.end());
    return info;
}

GenerationConfig Session::config_of_profile(const std::string& name) const {
    const Profile& profile = find_profile(opened_->bundle, opened_->runs(), name);
    GenerationConfig config;
    config.tau = profile.tau;
    config.metric = profile.metric;
    config.masks = profile.masks;
    config.masks_of_tau = true;
    opened_->check(config);
    return config;
}

} // namespace mars
