// runtime/decode/schedule.py: waiting sequences: clients take turns, and each client's sequences keep their order.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>

#include "decode/sequence.hpp"

namespace mars {

/// Order: the first sequence of each client, then the second of each, and so on. After a sequence has started, its client comes last.
///
/// So a client that sends a hundred requests at once delays only itself. Sequences without a client count as sequences of one client.
class Queue {
  public:
    bool empty() const { return lines_.empty(); }
    std::int64_t size() const;

    /// Add a sequence after the others of its client.
    void add(std::shared_ptr<Sequence> seq);

    /// The first sequence that `good` accepts, in order of turns; null if none.
    Sequence* first(const std::function<bool(Sequence&)>& good) const;

    /// Remove a sequence that starts, and return it; its client's turn is over.
    std::shared_ptr<Sequence> remove(const Sequence& seq);

    /// Remove sequences that ended while they waited. The turns of clients do not change.
    void drop_finished();

  private:
    using Line = std::deque<std::shared_ptr<Sequence>>; // of one client, never empty

    std::list<Line> lines_; // in the order of turns
};

} // namespace mars
