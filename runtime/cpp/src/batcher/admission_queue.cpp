#include "batcher/admission_queue.hpp"

#include <algorithm>
#include <cmath>

namespace mars {

namespace {

constexpr double max_retry = 60.0; // longest retry_after in seconds
constexpr std::int64_t recent = 8; // finished requests that the estimate is based on, about

} // namespace

std::optional<Overloaded> AdmissionQueue::refusal(const Client& client, std::int64_t num_rows, std::int64_t num_held) const {
    const auto mine = client ? clients_.find(client) : clients_.end();
    // Cancelled requests keep their place until the running step ends; count them too.
    const std::int64_t waiting = std::max(num_waiting(client, num_rows), num_held + 1 - limits_.rows());
    const double share = limits_.client_share * static_cast<double>(limits_.rows() + limits_.max_waiting);
    const std::int64_t max_of_client = std::max<std::int64_t>(1, static_cast<std::int64_t>(share));
    std::string words;
    if (waiting > limits_.max_waiting)
        words = std::to_string(waiting - 1) + " requests wait already (max_waiting)";
    else if (mine != clients_.end() && mine->second >= max_of_client)
        words = "this client has " + std::to_string(mine->second) + " requests here already (client_share)";
    else
        return std::nullopt;
    const double guess = seconds_ * static_cast<double>(waiting) / static_cast<double>(limits_.rows());
    const double retry = std::clamp(guess, 1.0, max_retry);
    return Overloaded(words + "; try again in " + std::to_string(std::lround(retry)) + " s, or submit with more time to wait", retry);
}

/// Requests, including one more of `client`, for which no sequence is free. Rows are assigned between two steps, so a
/// request without a sequence is not waiting if one is free.
std::int64_t AdmissionQueue::num_waiting(const Client& client, std::int64_t num_rows) const {
    const std::int64_t here = num_here_ + 1;
    if (!limits_.max_rows_per_client) return here - std::min(num_rows, here);
    const auto rows_of = [this](const Client& who, std::int64_t number) {
        return who ? std::min(number, *limits_.max_rows_per_client) : number;
    };
    const auto mine = clients_.find(client);
    const std::int64_t before = mine == clients_.end() ? 0 : mine->second;
    std::int64_t served = rows_of(client, before + 1) - rows_of(client, before);
    for (const auto& [who, number] : clients_) served += rows_of(who, number);
    return here - std::min(num_rows, served);
}

void AdmissionQueue::admit(const Client& client) {
    ++clients_[client];
    ++num_here_;
    ++num_admitting;
}

void AdmissionQueue::accept() {
    --num_admitting;
    ++counts.accepted;
}

void AdmissionQueue::release(const Client& client) {
    --num_admitting;
    ++counts.refused;
    forget(client);
}

void AdmissionQueue::forget(const Client& client) {
    const auto mine = clients_.find(client);
    if (mine == clients_.end()) return;
    --num_here_;
    if (--mine->second == 0) clients_.erase(mine);
}

void AdmissionQueue::end(const Client& client, std::int64_t Counts::* outcome, const Completion& answer) {
    forget(client);
    ++(counts.*outcome);
    counts.prompt_tokens += answer.stats.prompt_tokens;
    counts.tokens += static_cast<std::int64_t>(answer.token_ids.size());
    if (outcome != &Counts::finished) return;
    const double seconds = answer.stats.prefill_time + answer.stats.decode_time;
    seconds_ += (seconds - seconds_) / static_cast<double>(std::min(counts.finished, recent));
}

} // namespace mars
