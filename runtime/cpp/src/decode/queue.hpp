// The queue of sequences: clients take turns, and each client's sequences keep their order (runtime/decode/queue.py).
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>

#include "decode/sequence.hpp"

namespace mars {

/// Order: the first sequence of each client, then the second of each, and so on. A client whose sequence was taken goes to the
/// end.
///
/// So a client that sends a hundred requests at once delays only itself. Sequences without a client name share one line.
class Queue {
  public:
    bool empty() const { return lines_.empty(); }
    std::size_t size() const { return size_; }
    void add(Sequence* seq);

    /// The first sequence that `good` accepts, in order of turns; null if none.
    Sequence* first(const std::function<bool(const Sequence&)>& good) const;

    /// Remove a sequence that gets its place; its client goes to the end.
    void remove(const Sequence* seq);

    /// Remove sequences that ended while waiting and call `gone` for each. The order of clients does not change.
    void drop_finished(const std::function<void(Sequence*)>& gone);

  private:
    struct Line {
        std::optional<std::string> client;
        std::deque<Sequence*> seqs;
    };
    using Lines = std::list<Line>;

    void close(Lines::iterator line);

    Lines lines_;                                                        // never empty lines, in order of turns
    std::unordered_map<std::optional<std::string>, Lines::iterator> of_; // by client
    std::size_t size_ = 0;
};

} // namespace mars
