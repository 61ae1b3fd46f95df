// runtime/decode/limits.py: how much a batcher runs at once, and how much one request may ask for.
#include <mars/batcher.hpp>

namespace mars {

namespace {

constexpr std::int64_t usual_rows = 8;
constexpr std::int64_t max_places = 1 << 20; // sequences, or waiting requests

/// Add to a text that lists problems.
void add(std::string& wrong, const std::string& problem) { wrong += (wrong.empty() ? "" : "; ") + problem; }

} // namespace

void Limits::check() const {
    std::string wrong;
    const auto positive = [&](const char* name, std::int64_t value) {
        if (value < 1) add(wrong, std::string(name) + " must be 1 or more, not " + std::to_string(value));
    };
    const auto place = [&](const char* name, std::int64_t value) {
        positive(name, value);
        if (value > max_places)
            add(wrong, std::string(name) + " must be at most " + std::to_string(max_places) + ", not " + std::to_string(value));
    };
    place("max_rows", rows());
    place("max_waiting", max_waiting);
    positive("prefill_tokens", prefill_tokens);
    positive("max_prompt_tokens", max_prompt_tokens.value_or(1));
    positive("max_new_tokens", max_new_tokens.value_or(1));
    positive("max_stops", max_stops.value_or(1));
    positive("kv_bytes", kv_bytes.value_or(1));
    positive("max_rows_per_client", max_rows_per_client.value_or(1));
    positive("cache_block", cache_block);
    if (!(client_share > 0 && client_share <= 1))
        add(wrong, "client_share must be a number above 0, at most 1, not " + std::to_string(client_share));
    if (!wrong.empty()) throw SessionError(wrong);
}

void Limits::check(const GenerationConfig& config) const {
    std::string wrong;
    const char* first = "";
    const auto at_most = [&](const char* field, const char* name, std::int64_t asked, const std::optional<std::int64_t>& most) {
        if (!most || asked <= *most) return;
        if (wrong.empty()) first = field;
        add(wrong, std::to_string(asked) + " " + name + " are requested, this service allows at most " + std::to_string(*most) +
                       "; request fewer");
    };
    at_most("max_new_tokens", "max_new_tokens", config.max_new_tokens, max_new_tokens);
    at_most("stop", "stop strings", static_cast<std::int64_t>(config.stop.size()), max_stops);
    at_most("eos_ids", "eos_ids", config.eos_ids ? static_cast<std::int64_t>(config.eos_ids->size()) : 0, max_stops);
    if (!wrong.empty()) throw SessionError(wrong, "limit_exceeded", first);
}

std::int64_t Limits::rows() const { return max_rows.value_or(usual_rows); }

} // namespace mars
