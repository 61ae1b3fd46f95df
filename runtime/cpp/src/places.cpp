// Counting places, and guessing when there will be one.
#include "places.hpp"

#include <algorithm>
#include <cmath>

namespace mars {

namespace {

constexpr double longest_retry = 60.0; // seconds that a refused client is told to wait, at most
constexpr std::int64_t recent = 8;     // finished requests that the guess of a retry rests on, about

} // namespace

std::optional<Overloaded> Places::refusal(const Client& client, std::int64_t num_waiting) const {
    const auto mine = client ? clients_.find(*client) : clients_.end();
    std::string words;
    if (num_waiting >= limits_.max_waiting)
        words = std::to_string(num_waiting) + " requests wait already (max_waiting)";
    else if (mine != clients_.end() && mine->second >= limits_.max_of_client())
        words = "this client has " + std::to_string(mine->second) + " requests here already (client_share)";
    else
        return std::nullopt;
    const double guess = seconds_ * static_cast<double>(num_waiting + 1) / static_cast<double>(limits_.max_rows);
    const double retry = std::clamp(guess, 1.0, longest_retry);
    return Overloaded(words + "; try again in " + std::to_string(std::lround(retry)) + " s, or submit with more time to wait", retry);
}

void Places::enter(const Client& client) {
    if (client) ++clients_[*client];
    ++num_entering;
}

void Places::accept() {
    --num_entering;
    ++counts.accepted;
}

void Places::leave_in_vain(const Client& client) {
    --num_entering;
    ++counts.refused;
    forget(client);
}

void Places::forget(const Client& client) {
    if (!client) return;
    const auto mine = clients_.find(*client);
    if (mine != clients_.end() && --mine->second <= 0) clients_.erase(mine);
}

void Places::took(double seconds) {
    seconds_ += (seconds - seconds_) / static_cast<double>(std::clamp<std::int64_t>(counts.finished, 1, recent));
}

} // namespace mars
