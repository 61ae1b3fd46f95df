#include "decode/queue.hpp"

#include <algorithm>

namespace mars {

void Queue::add(Sequence* seq) {
    const auto [at, is_new] = of_.try_emplace(seq->client, lines_.end());
    if (is_new) at->second = lines_.insert(lines_.end(), Line{seq->client, {}});
    at->second->seqs.push_back(seq);
    ++size_;
}

Sequence* Queue::first(const std::function<bool(const Sequence&)>& good) const {
    bool is_left = true;
    for (std::size_t round = 0; is_left; ++round) {
        is_left = false;
        for (const Line& line : lines_) {
            if (round >= line.seqs.size()) continue;
            is_left = true;
            if (good(*line.seqs[round])) return line.seqs[round];
        }
    }
    return nullptr;
}

void Queue::remove(const Sequence* seq) {
    const auto line = of_.at(seq->client);
    line->seqs.erase(std::find(line->seqs.begin(), line->seqs.end(), seq));
    --size_;
    if (line->seqs.empty())
        close(line);
    else
        lines_.splice(lines_.end(), lines_, line);
}

void Queue::drop_finished(const std::function<void(Sequence*)>& gone) {
    for (auto line = lines_.begin(); line != lines_.end();) {
        for (auto at = line->seqs.begin(); at != line->seqs.end();) {
            Sequence* const seq = *at;
            seq->refresh();
            if (!seq->finish_reason) {
                ++at;
                continue;
            }
            at = line->seqs.erase(at);
            --size_;
            gone(seq);
        }
        const auto passed = line++;
        if (passed->seqs.empty()) close(passed);
    }
}

void Queue::close(Lines::iterator line) {
    of_.erase(line->client);
    lines_.erase(line);
}

} // namespace mars
