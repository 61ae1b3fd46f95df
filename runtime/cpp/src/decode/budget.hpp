// How many rows a batch may have in the KV memory that it is given. Twin of runtime/decode/budget.py: counts entries, allocates nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "decode/row.hpp"

namespace mars {

/// KV memory for at most `max_rows` rows: `num_bytes` of it, nothing for as much as comes.
///
/// A batch allocates as many entries for each of its rows as the longest needs, of `entry_bytes` each. A row of this backend holds
/// `max_capacity`; `fixed` says that it always does.
struct KvBudget {
    std::int64_t max_rows = 1;
    std::optional<std::int64_t> num_bytes = std::nullopt;
    std::int64_t entry_bytes = 1, max_capacity = 0;
    bool fixed = false;

    /// Rows of a batch that holds `rows`, of which there is at least one: at least 1, at most `max_rows`.
    std::int64_t num_rows(const std::vector<Row*>& rows) const;

    /// Entries of all rows together.
    std::int64_t num_entries() const;

    /// Entries that each of `rows` rows may have, nothing for any number.
    std::optional<std::int64_t> most_entries(std::int64_t rows) const;

    /// Throws SessionError for a row that does not even fit alone.
    void check(const Row& row) const;

  private:
    std::int64_t row_bytes(const Row& row) const;
};

} // namespace mars
