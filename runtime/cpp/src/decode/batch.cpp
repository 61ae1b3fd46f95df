#include "decode/batch.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include <mars/errors.hpp>

#include "decode/prefix.hpp"

namespace mars {

namespace {

constexpr std::int64_t budget_slots = 64; // of a decode step within a KV budget: a wider row adds entries to all rows of its step

std::string megabytes(std::int64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2f MB", static_cast<double>(bytes) / 1e6);
    return text;
}

} // namespace

std::optional<std::int64_t> KvBudget::max_slots() const { return num_bytes && !fixed ? std::optional(budget_slots) : std::nullopt; }

std::int64_t KvBudget::num_entries() const { return num_bytes ? *num_bytes / entry_bytes : max_rows * max_capacity; }

std::optional<std::int64_t> KvBudget::max_entries(std::int64_t rows) const {
    if (!num_bytes || fixed) return std::nullopt;
    return *num_bytes / (entry_bytes * rows);
}

void KvBudget::check(const Row& row) const {
    if (!num_bytes || row_bytes(row) <= *num_bytes) return;
    throw SessionError("a prompt of " + std::to_string(row.stats.prompt_tokens) + " tokens with max_new_tokens " +
                       std::to_string(row.config().max_new_tokens) + " may take " + megabytes(row_bytes(row)) +
                       " of KV memory, this service gives " + megabytes(*num_bytes) + " (kv_bytes); shorten the prompt or max_new_tokens");
}

std::int64_t KvBudget::row_bytes(const Row& row) const {
    if (fixed) return max_capacity * entry_bytes;
    // Bounded by the context first: max_new_tokens may be so large that the sum would overflow.
    const std::int64_t wanted = row.stats.prompt_tokens + std::min(row.config().max_new_tokens, max_capacity);
    const std::int64_t entries = std::min(wanted, max_capacity) + budget_slots;
    return (entries * 5 + 4 * growth - 1) / (4 * growth) * growth * entry_bytes;
}

Batch::Batch(Backend& device, std::int64_t rows, std::int64_t mask_id, std::int64_t chunk, std::optional<std::int64_t> max_slots)
    : backend(device), num_rows(rows), mask_id_(mask_id), chunk_(chunk), max_slots_(max_slots), cache_(device.new_cache(rows)) {}

std::vector<Predictions> Batch::step(std::int64_t first, const std::vector<Feed>& feeds) {
    std::vector<Predictions> predictions;
    const auto count = static_cast<std::int64_t>(feeds.size()), limit = backend.max_entries();
    for (std::int64_t from = 0, to = 0; from < count; from = to) {
        std::int64_t slots = 0, longest = 0;
        for (; to < count; ++to) {
            const std::int64_t widest = std::max(slots, feeds[static_cast<std::size_t>(to)].slots());
            const std::int64_t end = std::max(longest, active[static_cast<std::size_t>(first + to)]->cursor);
            if (to > from && end + widest > limit) break;
            slots = widest;
            longest = end;
        }
        forward(first + from, &feeds[static_cast<std::size_t>(from)], to - from);
        for (std::int64_t i = from; i < to; ++i) {
            const Feed& feed = feeds[static_cast<std::size_t>(i)];
            const Row& row = *active[static_cast<std::size_t>(first + i)];
            predictions.push_back(Predictions::of(output_, i - from, feed.outputs(), row.config().metric));
        }
    }
    return predictions;
}

void Batch::forward(std::int64_t first, const Feed* feeds, std::int64_t count, bool is_chunk) {
    input_.rows = count;
    input_.slots = 0;
    input_.outputs = 1;
    input_.want_topk = false;
    for (std::int64_t i = 0; i < count; ++i) {
        input_.slots = std::max(input_.slots, feeds[i].slots());
        input_.outputs = std::max(input_.outputs, feeds[i].outputs());
    }
    input_.input_ids.assign(static_cast<std::size_t>(input_.rows * input_.slots), mask_id_);
    input_.output_index.assign(static_cast<std::size_t>(input_.rows * input_.outputs), 0);
    input_.kv_length.clear();
    bool want_logits = false;
    std::int64_t longest = 0;
    for (std::int64_t i = 0; i < input_.rows; ++i) {
        Row& row = *active[static_cast<std::size_t>(first + i)];
        const Feed& feed = feeds[i];
        row.stats.starts();
        if (row.stem) row.stem->feeds(row.cursor, input_.slots, is_chunk);
        const auto ids = std::copy_n(row.tokens.begin() + row.cursor, feed.pending, input_.input_ids.begin() + i * input_.slots);
        auto mask = std::copy_n(row.proposals.token_ids.begin(), feed.proposals, ids);
        if (row.draft) {
            std::int64_t position = row.cursor + feed.pending + feed.proposals;
            for (const auto end = input_.input_ids.begin() + (i + 1) * input_.slots; mask != end; ++mask) *mask = row.draft->id(position++);
        }
        const std::int64_t start = std::max(feed.pending - 1, std::int64_t{0});
        for (std::int64_t j = start; j < feed.slots(); ++j)
            input_.output_index[static_cast<std::size_t>(i * input_.outputs + j - start)] = j;
        input_.kv_length.push_back(row.cursor);
        longest = std::max(longest, row.cursor);
        want_logits = want_logits || row.wants_logits();
        input_.want_topk = input_.want_topk || row.wants_topk();
    }
    cache_->reserve(longest + input_.slots);
    const auto begun = std::chrono::steady_clock::now();
    backend.step(*cache_, first, input_, want_logits, output_);
    step_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

void Batch::recall(Row& row, std::optional<std::int64_t> most) {
    if (!row.stem || row.finish_reason) return;
    row.cursor = row.stem->recall(*cache_, index_of(row), row.tokens, chunk(), backend.max_capacity(), most);
    row.stats.cached_tokens = row.cursor;
}

void Batch::move(std::int64_t source, std::int64_t target) {
    if (source == target) return;
    Row* row = active[static_cast<std::size_t>(source)];
    cache_->move(source, target, row->cursor);
    active[static_cast<std::size_t>(target)] = row;
}

void Batch::keep(const Row& row) {
    if (row.stem) row.stem->keep(*cache_, index_of(row), row.tokens);
}

void Batch::moved(const Row& row) {
    if (row.stem) row.stem->moved(row.cursor);
}

void Batch::feed(Row& row, std::int64_t num_tokens, bool is_chunk) {
    const Feed pending{num_tokens, 0, 0};
    forward(index_of(row), &pending, 1, is_chunk);
    row.cursor += num_tokens;
    moved(row);
    ++(is_chunk ? row.stats.prefill_forwards : row.stats.forwards);
}

std::int64_t Batch::max_pending(std::int64_t block) const {
    const std::int64_t most = std::max(chunk_, 2 * block);
    return std::min({most, backend.max_slots().value_or(most), max_slots_.value_or(most)});
}

bool Batch::is_behind(const Row& row, std::int64_t block) const { return row.num_pending() > max_pending(block) && fits(row); }

std::vector<std::vector<Row*>> Batch::neighbours(const std::vector<Row*>& rows, std::int64_t block) const {
    std::vector<std::vector<Row*>> groups;
    bool is_new = true;
    for (Row* row : rows) {
        const bool is_left_out = is_behind(*row, block);
        if (!is_left_out && is_new) groups.emplace_back();
        if (!is_left_out) groups.back().push_back(row);
        is_new = is_left_out;
    }
    return groups;
}

std::int64_t Batch::chunk() const { return std::min(chunk_, backend.max_slots().value_or(chunk_)); }

std::int64_t Batch::room(const Row& row) const {
    const std::int64_t pending = row.num_pending();
    std::int64_t room = backend.max_capacity() - row.cursor - pending;
    if (const auto slots = backend.max_slots()) room = std::min(room, *slots - pending);
    if (const auto outputs = backend.max_outputs()) room = std::min(room, *outputs - 1);
    return room;
}

std::int64_t Batch::decode_room(const Row& row) const {
    const std::int64_t most = room(row);
    return max_slots_ ? std::min(most, *max_slots_ - row.num_pending()) : most;
}

std::int64_t Batch::index_of(const Row& row) const { return std::find(active.begin(), active.end(), &row) - active.begin(); }

} // namespace mars
