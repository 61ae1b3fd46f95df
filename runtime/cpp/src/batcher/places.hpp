// Who may come in: places in a batcher, the shares of its clients, and what was done with them. Twin of runtime/batcher/places.py; takes no lock of
// its own and runs nothing.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <mars/batcher.hpp>

namespace mars {

/// The places that `limits` gives, guarded by whoever owns them.
class Places {
  public:
    explicit Places(const Limits& limits) : limits_(limits) {}

    using Client = std::optional<std::string>;

    /// Why there is no place for `client` now, in a batch of `num_rows` rows. `num_held` requests have none yet, ended ones included:
    /// those are held until the step in hand is over.
    std::optional<Overloaded> refusal(const Client& client, std::int64_t num_rows, std::int64_t num_held) const;

    /// Take a place.
    void enter(const Client& client);

    /// A place that was taken has its request, or gets none.
    void accept();
    void leave_in_vain(const Client& client);

    /// A request of `client` is over.
    void forget(const Client& client);

    /// A request finished, this long after its first forward.
    void took(double seconds);

    Counts counts;
    std::int64_t num_entering = 0; // taken, while their prompts are tokenized

  private:
    std::int64_t num_waiting(const Client& client, std::int64_t num_rows) const;

    const Limits limits_;
    std::map<Client, std::int64_t> clients_; // requests that are here, nobody's too
    std::int64_t num_here_ = 0;              // of them all
    double seconds_ = 0.0;                   // that a request takes from its first forward on, about
};

} // namespace mars
