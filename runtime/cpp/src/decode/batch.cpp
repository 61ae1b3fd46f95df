#include "decode/batch.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include <mars/errors.hpp>

#include "decode/prefix.hpp"

namespace mars {

namespace {

constexpr std::int64_t budget_slots = 64; // of a decode step within a KV budget: a wider sequence adds entries to all sequences of its step

std::string megabytes(std::int64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2f MB", static_cast<double>(bytes) / 1e6);
    return text;
}

} // namespace

std::optional<std::int64_t> KvBudget::max_slots() const { return num_bytes && !fixed ? std::optional(budget_slots) : std::nullopt; }

std::int64_t KvBudget::num_entries() const { return num_bytes ? *num_bytes / entry_bytes : max_rows * max_capacity; }

std::optional<std::int64_t> KvBudget::max_entries(std::int64_t count) const {
    if (!num_bytes || fixed) return std::nullopt;
    return *num_bytes / (entry_bytes * count);
}

void KvBudget::check(const Sequence& seq) const {
    if (!num_bytes || row_bytes(seq) <= *num_bytes) return;
    throw SessionError("a prompt of " + std::to_string(seq.stats.prompt_tokens) + " tokens with max_new_tokens " +
                       std::to_string(seq.config().max_new_tokens) + " may take " + megabytes(row_bytes(seq)) +
                       " of KV memory, this service gives " + megabytes(*num_bytes) + " (kv_bytes); shorten the prompt or max_new_tokens");
}

std::int64_t KvBudget::row_bytes(const Sequence& seq) const {
    if (fixed) return max_capacity * entry_bytes;
    // Bounded by the context first: max_new_tokens may be so large that the sum would overflow.
    const std::int64_t wanted = seq.stats.prompt_tokens + std::min(seq.config().max_new_tokens, max_capacity);
    const std::int64_t entries = std::min(wanted, max_capacity) + budget_slots;
    return (entries * 5 + 4 * growth - 1) / (4 * growth) * growth * entry_bytes;
}

Batch::Batch(Backend& device, std::int64_t count, std::int64_t mask_id, std::int64_t chunk, std::optional<std::int64_t> max_slots)
    : backend(device), num_rows(count), mask_id_(mask_id), chunk_(chunk), max_slots_(max_slots), cache_(device.new_cache(count)) {}

std::vector<Predictions> Batch::step(std::int64_t first, const std::vector<StepPlan>& plans) {
    std::vector<Predictions> predictions;
    const auto count = static_cast<std::int64_t>(plans.size()), limit = backend.max_entries();
    for (std::int64_t from = 0, to = 0; from < count; from = to) {
        std::int64_t slots = 0, longest = 0;
        for (; to < count; ++to) {
            const std::int64_t widest = std::max(slots, plans[static_cast<std::size_t>(to)].slots());
            const std::int64_t end = std::max(longest, active[static_cast<std::size_t>(first + to)]->cursor);
            if (to > from && end + widest > limit) break;
            slots = widest;
            longest = end;
        }
        forward(first + from, &plans[static_cast<std::size_t>(from)], to - from);
        for (std::int64_t i = from; i < to; ++i) {
            const StepPlan& plan = plans[static_cast<std::size_t>(i)];
            const Sequence& seq = *active[static_cast<std::size_t>(first + i)];
            predictions.push_back(Predictions::of(output_, i - from, plan.outputs(), seq.config().metric));
        }
    }
    return predictions;
}

void Batch::forward(std::int64_t first, const StepPlan* plans, std::int64_t count, bool is_chunk) {
    input_.rows = count;
    input_.slots = 0;
    input_.outputs = 1;
    input_.want_topk = false;
    for (std::int64_t i = 0; i < count; ++i) {
        input_.slots = std::max(input_.slots, plans[i].slots());
        input_.outputs = std::max(input_.outputs, plans[i].outputs());
    }
    input_.input_ids.assign(static_cast<std::size_t>(input_.rows * input_.slots), mask_id_);
    input_.output_index.assign(static_cast<std::size_t>(input_.rows * input_.outputs), 0);
    input_.kv_length.clear();
    bool want_logits = false;
    std::int64_t longest = 0;
    for (std::int64_t i = 0; i < input_.rows; ++i) {
        Sequence& seq = *active[static_cast<std::size_t>(first + i)];
        const StepPlan& plan = plans[i];
        seq.stats.starts();
        if (seq.prefix_handle) seq.prefix_handle->begin_step(seq.cursor, input_.slots, is_chunk);
        const auto ids = std::copy_n(seq.tokens.begin() + seq.cursor, plan.pending, input_.input_ids.begin() + i * input_.slots);
        auto mask = std::copy_n(seq.draft_tokens.token_ids.begin(), plan.draft_tokens, ids);
        if (seq.draft_slots) {
            std::int64_t position = seq.cursor + plan.pending + plan.draft_tokens;
            for (const auto end = input_.input_ids.begin() + (i + 1) * input_.slots; mask != end; ++mask)
                *mask = seq.draft_slots->id(position++);
        }
        const std::int64_t start = std::max(plan.pending - 1, std::int64_t{0});
        for (std::int64_t j = start; j < plan.slots(); ++j)
            input_.output_index[static_cast<std::size_t>(i * input_.outputs + j - start)] = j;
        input_.kv_length.push_back(seq.cursor);
        longest = std::max(longest, seq.cursor);
        want_logits = want_logits || seq.wants_logits();
        input_.want_topk = input_.want_topk || seq.wants_topk();
    }
    cache_->reserve(longest + input_.slots);
    const auto begun = std::chrono::steady_clock::now();
    backend.step(*cache_, first, input_, want_logits, output_);
    step_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

void Batch::lookup(Sequence& seq, std::optional<std::int64_t> most) {
    if (!seq.prefix_handle || seq.finish_reason) return;
    seq.cursor = seq.prefix_handle->lookup(*cache_, index_of(seq), seq.tokens, chunk(), backend.max_capacity(), most);
    seq.stats.cached_tokens = seq.cursor;
}

void Batch::move(std::int64_t source, std::int64_t target) {
    if (source == target) return;
    Sequence* seq = active[static_cast<std::size_t>(source)];
    cache_->move(source, target, seq->cursor);
    active[static_cast<std::size_t>(target)] = seq;
}

void Batch::store(const Sequence& seq) {
    if (seq.prefix_handle) seq.prefix_handle->store(*cache_, index_of(seq), seq.tokens);
}

void Batch::moved(const Sequence& seq) {
    if (seq.prefix_handle) seq.prefix_handle->moved(seq.cursor);
}

void Batch::run_chunk(Sequence& seq, std::int64_t num_tokens, bool is_chunk) {
    const StepPlan pending{num_tokens, 0, 0};
    forward(index_of(seq), &pending, 1, is_chunk);
    seq.cursor += num_tokens;
    moved(seq);
    ++(is_chunk ? seq.stats.prefill_forwards : seq.stats.forwards);
}

std::int64_t Batch::max_pending(std::int64_t block) const {
    const std::int64_t most = std::max(chunk_, 2 * block);
    return std::min({most, backend.max_slots().value_or(most), max_slots_.value_or(most)});
}

bool Batch::is_behind(const Sequence& seq, std::int64_t block) const { return seq.num_pending() > max_pending(block) && fits(seq); }

std::vector<std::vector<Sequence*>> Batch::neighbours(const std::vector<Sequence*>& seqs, std::int64_t block) const {
    std::vector<std::vector<Sequence*>> groups;
    bool is_new = true;
    for (Sequence* seq : seqs) {
        const bool is_left_out = is_behind(*seq, block);
        if (!is_left_out && is_new) groups.emplace_back();
        if (!is_left_out) groups.back().push_back(seq);
        is_new = is_left_out;
    }
    return groups;
}

std::int64_t Batch::chunk() const { return std::min(chunk_, backend.max_slots().value_or(chunk_)); }

std::int64_t Batch::room(const Sequence& seq) const {
    const std::int64_t pending = seq.num_pending();
    std::int64_t room = backend.max_capacity() - seq.cursor - pending;
    if (const auto slots = backend.max_slots()) room = std::min(room, *slots - pending);
    if (const auto outputs = backend.max_outputs()) room = std::min(room, *outputs - 1);
    return room;
}

std::int64_t Batch::decode_room(const Sequence& seq) const {
    const std::int64_t most = room(seq);
    return max_slots_ ? std::min(most, *max_slots_ - seq.num_pending()) : most;
}

std::int64_t Batch::index_of(const Sequence& seq) const { return std::find(active.begin(), active.end(), &seq) - active.begin(); }

} // namespace mars
