// runtime/decode/config.py: the settings of one request.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>

#include <mars/config.hpp>
#include <mars/errors.hpp>

#include "accept.hpp"

namespace mars {

std::string_view to_string(Metric metric) {
    return metric == Metric::margin ? "margin" : metric == Metric::entropy ? "entropy" : "probability";
}

std::optional<std::int64_t> masks_of(std::string_view text) {
    if (text == "auto") return auto_masks;
    if (text == "full") return all_masks;
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    return error == std::errc() && end == text.data() + text.size() && number >= 0 ? std::optional(number) : std::nullopt;
}

bool GenerationConfig::one_token() const { return !is_exact() && is_one_token(bound(), metric); }

GenerationConfig GenerationConfig::repeatable(bool has_masks, bool has_seed) const {
    GenerationConfig same = *this;
    const bool has_tau = !is_exact() && !one_token();
    if (has_tau && !has_masks && masks == auto_masks && (has_seed || !is_greedy())) {
        same.masks = all_masks;
        same.masks_of_tau = true;
    }
    return same;
}

GenerationConfig GenerationConfig::with_profile(const GenerationConfig& profile) const {
    GenerationConfig set = *this;
    set.tau = profile.tau;
    set.exact = profile.exact;
    set.metric = profile.metric;
    set.masks = profile.masks;
    set.masks_of_tau = true;
    return set;
}

void GenerationConfig::check() const {
    std::ostringstream wrong;
    const char* first = "tau";
    const auto check = [&](const char* name, bool good, const char* what, auto value) {
        if (!good && wrong.tellp() == 0) first = name;
        if (!good) wrong << (wrong.tellp() > 0 ? "; " : "") << name << " must be " << what << ", not " << value;
    };
    const auto from_zero = [](double value) { return std::isfinite(value) && value >= 0; };
    const bool good_eos = !eos_ids || std::all_of(eos_ids->begin(), eos_ids->end(), [](std::int64_t id) { return id >= 0; });
    const bool good_stop = std::none_of(stop.begin(), stop.end(), [](const std::string& s) { return s.empty(); });
    check("tau", !tau || from_zero(*tau), "a number of 0 or more", bound());
    check("max_new_tokens", max_new_tokens >= 1, "an integer of 1 or more", max_new_tokens);
    check("masks", masks >= all_masks, "auto, full or an integer of 0 or more", masks);
    check("prompt_lookup", prompt_lookup >= 0, "an integer of 0 or more", prompt_lookup);
    check("eos_ids", good_eos, "token ids", "negative numbers");
    check("stop", good_stop, "non-empty strings", "an empty one");
    check("temperature", from_zero(temperature), "a number of 0 or more", temperature);
    check("top_k", top_k >= 0, "an integer of 0 or more", top_k);
    check("top_p", std::isfinite(top_p) && top_p > 0 && top_p <= 1, "a number above 0, at most 1", top_p);
    check("deadline", !deadline || (std::isfinite(*deadline) && *deadline > 0), "a number of seconds above 0", deadline.value_or(0));
    check("min_p", std::isfinite(min_p) && min_p >= 0 && min_p <= 1, "a number of 0 to 1", min_p);
    check("repetition_penalty", std::isfinite(repetition_penalty) && repetition_penalty > 0, "a number above 0", repetition_penalty);
    if (exact.value_or(false) && tau)
        wrong << (wrong.tellp() > 0 ? "; " : "") << "exact and tau exclude each other: exact verifies every token, tau " << *tau
              << " accepts likely tokens without verification; give one of them";
    if (wrong.tellp() == 0 && prompt_lookup > 0 && !is_exact())
        throw SessionError("prompt_lookup works in exact mode only, not with a tau: give one of them", "invalid_value", "prompt_lookup");
    if (wrong.tellp() > 0) throw SessionError(wrong.str(), "invalid_value", first);
}

} // namespace mars
