#include "decode/queue.hpp"

#include <algorithm>

namespace mars {

void Queue::add(Row* row) {
    const auto [at, is_new] = of_.try_emplace(row->client, lines_.end());
    if (is_new) at->second = lines_.insert(lines_.end(), Line{row->client, {}});
    at->second->rows.push_back(row);
    ++size_;
}

Row* Queue::first(const std::function<bool(const Row&)>& good) const {
    bool is_left = true;
    for (std::size_t round = 0; is_left; ++round) {
        is_left = false;
        for (const Line& line : lines_) {
            if (round >= line.rows.size()) continue;
            is_left = true;
            if (good(*line.rows[round])) return line.rows[round];
        }
    }
    return nullptr;
}

void Queue::remove(const Row* row) {
    const auto line = of_.at(row->client);
    line->rows.erase(std::find(line->rows.begin(), line->rows.end(), row));
    --size_;
    if (line->rows.empty())
        close(line);
    else
        lines_.splice(lines_.end(), lines_, line);
}

void Queue::drop_finished(const std::function<void(Row*)>& gone) {
    for (auto line = lines_.begin(); line != lines_.end();) {
        for (auto at = line->rows.begin(); at != line->rows.end();) {
            Row* const row = *at;
            row->refresh();
            if (!row->finish_reason) {
                ++at;
                continue;
            }
            at = line->rows.erase(at);
            --size_;
            gone(row);
        }
        const auto passed = line++;
        if (passed->rows.empty()) close(passed);
    }
}

void Queue::close(Lines::iterator line) {
    of_.erase(line->client);
    lines_.erase(line);
}

} // namespace mars
