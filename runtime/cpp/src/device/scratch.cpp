// Sums of a step and of an opening.
#include "device/scratch.hpp"

#include <algorithm>
#include <map>

namespace mars {

namespace {

constexpr std::int64_t of_library = std::int64_t{10}
                                    << 20;               // what ONNX Runtime's first environment takes; its code is there since the start
constexpr std::int64_t of_graph = std::int64_t{8} << 20; // of a session without weights: nodes, plans, small tensors
constexpr double of_float = 4.0;                         // bytes: activations are computed in so many, whatever the weights
constexpr double too_many = 1e18;
constexpr std::size_t most_sizes = 16;

double real(std::int64_t number) { return static_cast<double>(number); }

std::int64_t whole(double bytes) { return static_cast<std::int64_t>(std::clamp(bytes, 0.0, too_many)); }

/// Bytes of a weight.
double width_of(const std::string& precision) {
    static const std::map<std::string, double> widths{{"float32", 4.0}, {"float16", 2.0}, {"bfloat16", 2.0}, {"int4", 0.5}};
    const auto at = widths.find(precision);
    return at == widths.end() ? 1.0 : at->second;
}

std::int64_t inner_of(const ModelInfo& model, const Variant& variant, std::int64_t weights) {
    return whole(real(weights) / width_of(variant.precision) / (3.0 * real(model.hidden_size) * real(model.num_layers)));
}

bool holds(const Scratch::Size& larger, const Scratch::Size& smaller) {
    return larger[0] >= smaller[0] && larger[1] >= smaller[1] && larger[2] >= smaller[2];
}

} // namespace

void require_session(const Headroom& headroom, const ModelInfo& model, std::int64_t weights, const std::string& precision,
                     std::optional<int> threads, bool has_begun) {
    if (headroom.is_limited()) Headroom::return_freed();
    // Weights in the layout that products like best take the place of those that were read; of the vocabulary's there are two, one as a table
    // and one for the product.
    const double copies = precision == "float16" ? 2.0 : 1.1;
    const double table = real(model.vocab_size) * real(model.hidden_size) * of_float;
    const std::int64_t num_bytes = whole(copies * real(weights) + table + real(of_graph + (has_begun ? 0 : of_library)));
    // The thread that runs a step is one of them.
    const std::int64_t others = (threads ? std::int64_t{*threads} : std::int64_t{num_cores()}) - 1;
    headroom.require({num_bytes, "opening this model", "use a model of fewer or smaller weights", headroom.stacks(others), 0});
}

Scratch::Scratch(const ModelInfo& model, std::int64_t inner, bool arena, Headroom headroom)
    : headroom_(std::move(headroom)), arena_(arena), position_(of_float * (8.0 * real(model.hidden_size) + 4.0 * real(inner))),
      score_(3.0 * of_float * real(model.num_heads)), choice_(4.0 * of_float * real(model.vocab_size)) {}

Scratch::Scratch(const ModelInfo& model, const Variant& variant, std::int64_t weights, bool arena, Headroom headroom)
    : Scratch(model, inner_of(model, variant, weights), arena, std::move(headroom)) {}

Scratch::Step Scratch::step(std::int64_t rows, std::int64_t slots, std::int64_t capacity, std::int64_t outputs) {
    const Size size{rows * slots, whole(real(rows) * real(slots) * real(capacity)), rows * outputs};
    const bool is_limited = headroom_.is_limited();
    std::int64_t needed = 0;
    {
        const std::lock_guard<std::mutex> lock(lock_);
        const bool is_known = arena_ && has_run(size);
        if (is_known && !is_limited) return {};
        needed = is_known ? 0 : num_bytes(size);
        // It grows by twice what it last grew by, whatever is asked of it; where that is not there, by all that is, and leaves nothing for
        // anybody.
        if (arena_) needed = std::max(2 * needed, is_limited ? grown_ + first_growth : 0);
    }
    Step step;
    step.size_ = size;
    if (arena_) {
        step.scratch_ = this;
        step.before_ = headroom_.address_space();
    }
    step.grant_.emplace(headroom_.grant({needed, "a step of " + std::to_string(rows) + " x " + std::to_string(slots) + " slots",
                                         "run fewer rows at once, shorten the prompt, or give another prefill_tokens"}));
    return step;
}

void Scratch::Step::ran() {
    if (scratch_ != nullptr) scratch_->keep(size_, before_);
}

void Scratch::keep(const Size& size, std::int64_t before) {
    const std::int64_t grown = headroom_.address_space() - before;
    const std::lock_guard<std::mutex> lock(lock_);
    grown_ += std::max<std::int64_t>(0, grown);
    if (has_run(size)) return;
    ran_.erase(std::remove_if(ran_.begin(), ran_.end(), [&](const Size& each) { return holds(size, each); }), ran_.end());
    ran_.push_back(size);
    if (ran_.size() > most_sizes) ran_.erase(ran_.begin());
}

std::int64_t Scratch::num_bytes(const Size& size) const {
    return whole(real(size[0]) * position_ + real(size[1]) * score_ + real(size[2]) * choice_);
}

bool Scratch::has_run(const Size& size) const {
    return std::any_of(ran_.begin(), ran_.end(), [&](const Size& each) { return holds(each, size); });
}

} // namespace mars
