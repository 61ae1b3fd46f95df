#include "decode/budget.hpp"

#include <algorithm>
#include <cstdio>

#include <mars/errors.hpp>

namespace mars {

namespace {

constexpr std::int64_t slots = 64; // of a decode step within a KV budget: a wider row adds entries to all rows of its step

std::string megabytes(std::int64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2f MB", static_cast<double>(bytes) / 1e6);
    return text;
}

} // namespace

std::int64_t KvBudget::num_rows(const std::vector<Row*>& rows) const {
    if (!num_bytes) return max_rows;
    std::int64_t largest = 1;
    for (const Row* row : rows) largest = std::max(largest, row_bytes(*row));
    return std::clamp<std::int64_t>(*num_bytes / largest, 1, max_rows);
}

std::optional<std::int64_t> KvBudget::max_slots() const { return num_bytes && !fixed ? std::optional(slots) : std::nullopt; }

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

/// Bytes of a finished row, including the quarter that memory grows ahead.
std::int64_t KvBudget::row_bytes(const Row& row) const {
    if (fixed) return max_capacity * entry_bytes;
    // Bounded by the context first: max_new_tokens may be so large that the sum would overflow.
    const std::int64_t wanted = row.stats.prompt_tokens + std::min(row.config().max_new_tokens, max_capacity);
    const std::int64_t entries = std::min(wanted, max_capacity) + slots;
    return (entries * 5 + 4 * growth - 1) / (4 * growth) * growth * entry_bytes;
}

} // namespace mars
