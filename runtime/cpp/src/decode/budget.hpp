// How many rows a batch may have within its KV memory (runtime/decode/batch.py).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "decode/row.hpp"

namespace mars {

/// KV memory for at most `max_rows` rows: `num_bytes`, or no limit.
///
/// A batch allocates for each row as many entries as its longest row needs, of `entry_bytes` each. A row of this
/// backend holds at most `max_capacity` entries, and always as many if `fixed`.
struct KvBudget {
    std::int64_t max_rows = 1;
    std::optional<std::int64_t> num_bytes = std::nullopt;
    std::int64_t entry_bytes = 1, max_capacity = 0;
    bool fixed = false;

    /// Rows of a batch that contains `rows` (at least one): 1 to `max_rows`.
    std::int64_t num_rows(const std::vector<Row*>& rows) const;

    /// Slots of a decode step that `row_bytes` counts on; no value means any number.
    std::optional<std::int64_t> max_slots() const;
    std::int64_t num_entries() const;

    /// Entries that each of `rows` rows may have; no value means no limit.
    std::optional<std::int64_t> max_entries(std::int64_t rows) const;

    /// Throws SessionError for a row that does not fit even alone.
    void check(const Row& row) const;

  private:
    std::int64_t row_bytes(const Row& row) const;
};

} // namespace mars
