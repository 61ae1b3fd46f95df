#include "decode/batch.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>

#include <mars/errors.hpp>

#include "decode/prefix.hpp"
#include "joined.hpp"

namespace mars {

namespace {

constexpr std::int64_t budget_slots = 64; // of a decode step within a KV budget: a wider sequence adds entries to all sequences of its step
constexpr std::int64_t shrink_factor = 4; // capacity is reduced to what the sequences need if it is this many times as large

std::string megabytes(std::int64_t bytes) { return printed("%.2f MB", static_cast<double>(bytes) / 1e6); }

} // namespace

std::optional<std::int64_t> KvBudget::max_slots() const { return num_bytes && !fixed ? std::optional(budget_slots) : std::nullopt; }

std::optional<std::int64_t> KvBudget::max_entries() const {
    return !num_bytes || fixed || by_row ? std::nullopt : std::optional(row_entries());
}

void KvBudget::check(const Sequence& seq) const {
    if (!num_bytes || entries(seq) <= row_entries()) return;
    throw SessionError("a prompt of " + std::to_string(seq.stats.prompt_tokens) + " tokens with max_new_tokens " +
                       std::to_string(seq.config().max_new_tokens) + " may need " + megabytes(entries(seq) * entry_bytes) +
                       " of KV memory, but this service allows " + megabytes(row_entries() * entry_bytes) +
                       " (kv_bytes); shorten the prompt or max_new_tokens");
}

std::int64_t KvBudget::entries(const Sequence& seq) const {
    if (fixed) return max_capacity;
    // Bounded by the context first: max_new_tokens may be so large that the sum would overflow.
    const std::int64_t wanted = seq.stats.prompt_tokens + std::min(seq.config().max_new_tokens, max_capacity);
    const std::int64_t length = std::min(wanted, max_capacity) + budget_slots;
    return by_row ? length : (length * 5 + 4 * growth - 1) / (4 * growth) * growth;
}

std::optional<std::int64_t> KvBudget::left(const std::vector<Sequence*>& seqs) const {
    if (!num_bytes || !by_row) return std::nullopt;
    return std::accumulate(seqs.begin(), seqs.end(), num_entries(),
                           [this](std::int64_t rest, const Sequence* seq) { return rest - entries(*seq); });
}

Batch::Batch(Backend& device, std::int64_t count, std::int64_t mask_id, bool releases_rows)
    : backend(device), num_rows(count), mask_id_(mask_id), releases_rows_(releases_rows), cache_(device.new_cache(count)) {}

std::vector<Sequence*> Batch::part(std::size_t first, std::size_t end) const {
    std::vector<Sequence*> seqs;
    for (std::size_t i = first; i < end; ++i) seqs.push_back(active_[i].get());
    return seqs;
}

std::size_t Batch::row_of(const Sequence& seq) const {
    const auto at = std::find_if(active_.begin(), active_.end(), [&](const auto& each) { return each.get() == &seq; });
    return static_cast<std::size_t>(at - active_.begin());
}

/// The number of final KV entries of each row.
std::vector<std::int64_t> Batch::lengths() const {
    std::vector<std::int64_t> lengths;
    for (const auto& seq : active_) lengths.push_back(seq->cursor);
    return lengths;
}

std::vector<Predictions> Batch::forward(const std::vector<Sequence*>& seqs, const std::vector<StepPlan>& plans) {
    std::vector<Predictions> predictions;
    const std::size_t first = row_of(*seqs.front());
    for (std::size_t from = 0, to = 0; from < seqs.size(); from = to) {
        std::int64_t slots = 0, longest = 0;
        for (; to < seqs.size(); ++to) {
            const std::int64_t widest = std::max(slots, plans[to].slots()), end = std::max(longest, seqs[to]->cursor);
            if (to > from && end + widest > backend.max_entries()) break;
            slots = widest;
            longest = end;
        }
        step(first + from, &plans[from], to - from);
        for (std::size_t i = from; i < to; ++i)
            predictions.push_back(
                Predictions::of(output_, static_cast<std::int64_t>(i - from), plans[i].outputs(), seqs[i]->config().metric));
    }
    return predictions;
}

void Batch::step(std::size_t first, const StepPlan* plans, std::size_t count) {
    input_ = StepInput{};
    input_.rows = static_cast<std::int64_t>(count);
    input_.outputs = 1;
    for (std::size_t i = 0; i < count; ++i) {
        input_.slots = std::max(input_.slots, plans[i].slots());
        input_.outputs = std::max(input_.outputs, plans[i].outputs());
    }
    reserve(first, count, input_.slots);
    input_.interrupt = std::make_shared<Interrupt>(input_.rows);
    const std::optional<std::int64_t> least = backend.reproducible_slots();
    bool want_logits = false;
    for (std::size_t i = 0; i < count; ++i) {
        Sequence& seq = *active_[first + i];
        const StepPlan& plan = plans[i];
        seq.stats.starts();
        seq.watch(input_.interrupt);
        const bool is_chunk = seq.is_prefilling() && plan.pending < seq.num_pending();
        seq.is_reproducible = seq.cursor == seq.num_reproducible && (least ? input_.slots >= *least : is_chunk);
        std::vector<std::int64_t>& ids = input_.input_ids;
        ids.insert(ids.end(), seq.tokens.begin() + seq.cursor, seq.tokens.begin() + seq.cursor + plan.pending);
        ids.insert(ids.end(), seq.draft_tokens.token_ids.begin(), seq.draft_tokens.token_ids.begin() + plan.draft_tokens);
        const std::int64_t tokens = plan.pending + plan.draft_tokens;
        const auto masks = static_cast<std::size_t>(input_.slots - tokens);
        ids.insert(ids.end(), masks, mask_id_);
        for (std::int64_t j = plan.pending - 1; j < plan.slots(); ++j) input_.output_index.push_back(j);
        input_.output_index.resize((i + 1) * static_cast<std::size_t>(input_.outputs));
        input_.kv_length.push_back(seq.cursor);
        want_logits = want_logits || seq.wants_logits();
        input_.want_topk = input_.want_topk || seq.wants_topk();
    }
    const auto begun = std::chrono::steady_clock::now();
    backend.step(*cache_, static_cast<std::int64_t>(first), input_, want_logits, output_);
    step_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    is_prepared = output_.is_prepared;
}

/// Make room for a step of `slots` slots. If memory is short, sequences that fit in the present room take their next step.
void Batch::reserve(std::size_t first, std::size_t count, std::int64_t slots) {
    std::int64_t longest = 0;
    for (const Sequence* seq : part(first, first + count)) longest = std::max(longest, seq->cursor);
    try {
        cache_->reserve(longest + slots, lengths());
    } catch (const SessionError&) {
        std::vector<Sequence*> seqs = part(first, first + count);
        const auto fits = [&](const Sequence* seq) { return seq->cursor + slots <= cache_->capacity(); };
        seqs.erase(std::remove_if(seqs.begin(), seqs.end(), fits), seqs.end());
        throw NoMemory{std::move(seqs), std::current_exception()};
    }
}

std::int64_t Batch::room(const Sequence& seq) const {
    const std::int64_t pending = seq.num_pending();
    std::int64_t room = backend.max_capacity() - seq.cursor - pending;
    if (const auto slots = backend.max_slots()) room = std::min(room, *slots - pending);
    if (const auto outputs = backend.max_outputs()) room = std::min(room, *outputs - 1);
    return room;
}

void Batch::lookup(Sequence& seq, std::int64_t chunk, std::optional<std::int64_t> most) {
    if (!seq.prefix_handle) return;
    const auto row = static_cast<std::int64_t>(row_of(seq));
    seq.cursor = seq.num_reproducible = seq.prefix_handle->lookup(*cache_, row, seq.tokens, chunk, backend.max_capacity(), most, lengths());
    seq.stats.cached_tokens = seq.cursor;
}

void Batch::store(const Sequence& seq) {
    if (seq.prefix_handle) seq.prefix_handle->store(*cache_, static_cast<std::int64_t>(row_of(seq)), seq.tokens, seq.num_reproducible);
}

void Batch::add(std::shared_ptr<Sequence> seq) {
    active_.push_back(seq);
    for (std::size_t i = active_.size() - 1; i > num_decoding_; --i) move(i - 1, i);
    active_[num_decoding_] = std::move(seq);
    release(num_decoding_);
}

void Batch::start_decoding(const Sequence& seq) {
    ++num_decoding_;
    store(seq); // now: the next prompt may begin alike
}

void Batch::drop_finished() {
    const std::size_t before = active_.size();
    const auto is_finished = [](const auto& seq) { return seq->finish_reason.has_value(); };
    for (auto at = std::find_if(active_.rbegin(), active_.rend(), is_finished); at != active_.rend();
         at = std::find_if(active_.rbegin(), active_.rend(), is_finished)) { // a sequence whose copy failed is next
        store(**at);
        auto gap = static_cast<std::size_t>(active_.rend() - at - 1);
        if (gap < num_decoding_) {
            move(--num_decoding_, gap);
            gap = num_decoding_;
        }
        for (std::size_t next = gap + 1; next < active_.size(); ++next) move(next, next - 1);
        active_.pop_back();
        release(active_.size());
    }
    if (!active_.empty() && active_.size() < before) shrink();
}

/// Move the sequence at `source` to `target`, with its final entries unless it has ended. It ends if these cannot be copied.
void Batch::move(std::size_t source, std::size_t target) {
    if (source == target) return;
    active_[target] = active_[source];
    release(target);
    Sequence& seq = *active_[target];
    if (!seq.finish_reason)
        ending({&seq}, [&] { cache_->move(static_cast<std::int64_t>(source), static_cast<std::int64_t>(target), seq.cursor); });
}

void Batch::release(std::size_t row) {
    if (releases_rows_) cache_->release(static_cast<std::int64_t>(row));
}

/// Reduce a capacity that only sequences needed that have ended: it makes every step slower.
void Batch::shrink() {
    std::int64_t longest = 0;
    for (const auto& seq : active_) longest = std::max(longest, seq->num_tokens());
    const std::int64_t capacity = bucket(longest + budget_slots, 0);
    if (cache_->capacity() < shrink_factor * capacity) return;
    try {
        cache_->shrink(capacity, lengths());
    } catch (const std::exception&) { // most likely a lack of memory for the copy; the rows stay as they were
    }
}

void Batch::free() {
    if (cache_->capacity() > 0) cache_ = backend.new_cache(num_rows);
}

} // namespace mars
