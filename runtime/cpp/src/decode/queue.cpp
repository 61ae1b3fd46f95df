#include "decode/queue.hpp"

#include <algorithm>
#include <numeric>

namespace mars {

namespace {

/// The client's line, or the end.
template <typename Lines>
auto line_of(Lines& lines, const std::optional<std::string>& client) {
    return std::find_if(lines.begin(), lines.end(), [&](const auto& line) { return line.front()->client == client; });
}

} // namespace

std::int64_t Queue::size() const {
    return std::accumulate(lines_.begin(), lines_.end(), std::int64_t{0},
                           [](std::int64_t sum, const Line& line) { return sum + static_cast<std::int64_t>(line.size()); });
}

void Queue::add(std::shared_ptr<Sequence> seq) {
    auto line = line_of(lines_, seq->client);
    if (line == lines_.end()) line = lines_.insert(line, Line{});
    line->push_back(std::move(seq));
}

Sequence* Queue::first(const std::function<bool(Sequence&)>& good) const {
    bool is_left = true;
    for (std::size_t round = 0; is_left; ++round) {
        is_left = false;
        for (const Line& line : lines_) {
            if (round >= line.size()) continue;
            is_left = true;
            if (good(*line[round])) return line[round].get();
        }
    }
    return nullptr;
}

std::shared_ptr<Sequence> Queue::remove(const Sequence& seq) {
    const auto line = line_of(lines_, seq.client);
    const auto at = std::find_if(line->begin(), line->end(), [&](const auto& each) { return each.get() == &seq; });
    std::shared_ptr<Sequence> taken = std::move(*at);
    line->erase(at);
    lines_.splice(lines_.end(), lines_, line);
    if (line->empty()) lines_.pop_back();
    return taken;
}

void Queue::drop_finished() {
    const auto is_finished = [](const auto& seq) {
        seq->refresh();
        return seq->finish_reason.has_value();
    };
    for (Line& line : lines_) line.erase(std::remove_if(line.begin(), line.end(), is_finished), line.end());
    lines_.remove_if([](const Line& line) { return line.empty(); });
}

} // namespace mars
