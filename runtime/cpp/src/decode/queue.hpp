// Rows that wait for a place: clients take turns, and the rows of each come in their order. Twin of runtime/decode/queue.py; runs nothing.
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

/// Rows come as they would get their places: the first of each client, then the second of each, and so on. A client whose row got a place
/// is the last of all clients then.
///
/// So whoever sends a hundred requests at once waits for them, and nobody else does. Rows of nobody are those of one client.
class Queue {
  public:
    bool empty() const { return lines_.empty(); }
    std::size_t size() const { return size_; }

    /// The last of its client.
    void add(Row* row);

    /// The first that `good` wants, in the order of their turns; nothing where it wants none.
    Row* first(const std::function<bool(const Row&)>& good) const;

    /// The row gets its place; its client's turn is over.
    void take(const Row* row);

    /// Rows that were ended while they waited go, each is told to `gone`; nobody's turn changes.
    void drop_finished(const std::function<void(Row*)>& gone);

  private:
    struct Line {
        std::optional<std::string> client;
        std::deque<Row*> rows;
    };
    using Lines = std::list<Line>;

    void close(Lines::iterator line);

    Lines lines_;                                                        // none is empty; in the order of their turns
    std::unordered_map<std::optional<std::string>, Lines::iterator> of_; // by client
    std::size_t size_ = 0;
};

} // namespace mars
