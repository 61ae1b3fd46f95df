// The small model's own loop, at the settings of runtime/decode/draft.py.
#include "decode/draft.hpp"

#include <algorithm>

#include "decode/policy.hpp"

namespace mars {

namespace {

constexpr std::int64_t length = 6; // proposals of one step, about

GenerationConfig config() {
    GenerationConfig own;
    own.tau = 0.5; // of the draft's own runs: what fails is verified away
    own.max_new_tokens = std::int64_t{1} << 31;
    own.window = full_window;
    return own;
}

} // namespace

Draft::Draft(Backend& backend, std::int64_t block, std::int64_t mask_id, std::vector<std::int64_t> eos_ids)
    : block_(block), eos_ids_(std::move(eos_ids)), row_(0, {}, config(), {}), batch_(backend, 1, mask_id) {
    batch_.active.push_back(&row_);
}

Proposals Draft::propose(const std::vector<std::int64_t>& tokens, std::int64_t most) {
    const auto known = static_cast<std::int64_t>(tokens.size());
    const auto ends = [&](std::int64_t token) { return std::find(eos_ids_.begin(), eos_ids_.end(), token) != eos_ids_.end(); };
    const auto differ = std::mismatch(row_.tokens.begin(), row_.tokens.end(), tokens.begin(), tokens.end()).first;
    row_.cursor = std::min({row_.cursor, static_cast<std::int64_t>(differ - row_.tokens.begin()), known - 1});
    row_.tokens = tokens;
    Proposals made{{}, {}, Source::draft};
    while (made.size() < std::min(most, length) && batch_.fits(row_)) {
        while (batch_.prefill(row_)) {
        }
        const std::vector<Feed> feeds = widest_feeds({&row_}, {batch_.room(row_)}, block_);
        const Accepted accepted = row_.accept(batch_.step(0, feeds, Keep::known).front());
        made.token_ids.insert(made.token_ids.end(), accepted.token_ids.begin(), accepted.token_ids.end());
        made.confidences.insert(made.confidences.end(), accepted.confidences.begin(), accepted.confidences.end());
        if (std::any_of(accepted.token_ids.begin(), accepted.token_ids.end(), ends)) break;
    }
    made.token_ids.resize(static_cast<std::size_t>(std::min(most, made.size())));
    made.confidences.resize(made.token_ids.size());
    return made;
}

} // namespace mars
