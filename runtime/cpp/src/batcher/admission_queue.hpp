// runtime/batcher/admission_queue.py: places in a batcher, clients' shares of them, and counts of requests.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <mars/batcher.hpp>

namespace mars {

/// The places that `limits` allows. The owner holds a lock.
class AdmissionQueue {
  public:
    explicit AdmissionQueue(const Limits& limits) : limits_(limits) {}

    using Client = std::optional<std::string>;

    /// Why there is no place for `client` now, in a batch of `num_rows` sequences; no value if there is one. `num_held`
    /// requests have no sequence, including ended ones, which keep their place until the current step is over.
    std::optional<Overloaded> refusal(const Client& client, std::int64_t num_rows, std::int64_t num_held) const;
    void admit(const Client& client);

    /// The request of a taken place was accepted, or refused.
    void accept();
    void release(const Client& client);

    /// A request of `client` has ended. `outcome`: its count.
    void end(const Client& client, std::int64_t Counts::* outcome, const Completion& answer);

    /// Free the place of a request of `client` that has ended.
    void forget(const Client& client);

    Counts counts;
    std::int64_t num_admitting = 0; // places of requests that are being tokenized

  private:
    std::int64_t num_waiting(const Client& client, std::int64_t num_rows) const;

    const Limits limits_;
    std::map<Client, std::int64_t> clients_; // requests of each client, including those without a client
    std::int64_t num_here_ = 0;              // of all clients
    double seconds_ = 0.0;                   // average time of a request after its first forward
};

} // namespace mars
