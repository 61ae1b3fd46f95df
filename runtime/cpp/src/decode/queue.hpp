// The queue of rows: clients take turns, and each client's rows keep their order (runtime/decode/queue.py).
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>

#include "decode/row.hpp"

namespace mars {

/// Order: the first row of each client, then the second of each, and so on. A client whose row was taken goes to the
/// end.
///
/// So a client that sends a hundred requests at once delays only itself. Rows without a client name share one line.
class Queue {
  public:
    bool empty() const { return lines_.empty(); }
    std::size_t size() const { return size_; }
    void add(Row* row);

    /// The first row that `good` accepts, in order of turns; null if none.
    Row* first(const std::function<bool(const Row&)>& good) const;

    /// Remove a row that gets its place; its client goes to the end.
    void remove(const Row* row);

    /// Remove rows that ended while waiting and call `gone` for each. The order of clients does not change.
    void drop_finished(const std::function<void(Row*)>& gone);

  private:
    struct Line {
        std::optional<std::string> client;
        std::deque<Row*> rows;
    };
    using Lines = std::list<Line>;

    void close(Lines::iterator line);

    Lines lines_;                                                        // never empty lines, in order of turns
    std::unordered_map<std::optional<std::string>, Lines::iterator> of_; // by client
    std::size_t size_ = 0;
};

} // namespace mars
