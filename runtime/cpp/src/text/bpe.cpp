// Merges with a priority queue: each merge adds at most two new pairs, and outdated pairs are skipped.
#include "text/bpe.hpp"

#include <algorithm>
#include <utility>

#include "text/utf8.hpp"

namespace mars {

namespace {

std::uint64_t pair_of(std::int32_t left, std::int32_t right) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
}

/// Order of a heap with the least element on top.
bool is_later(const Bpe::Scratch::Candidate& a, const Bpe::Scratch::Candidate& b) {
    return std::pair(a.rank, a.position) > std::pair(b.rank, b.position);
}

} // namespace

void Bpe::add_merge(std::int32_t left, std::int32_t right, std::int32_t merged) { merges_[pair_of(left, right)] = {num_ranks_++, merged}; }

void Bpe::propose(Scratch& scratch, std::size_t left) const {
    const Scratch::Symbol& symbol = scratch.symbols[left];
    if (symbol.next < 0) return;
    const std::int32_t right = scratch.symbols[static_cast<std::size_t>(symbol.next)].id;
    const auto merge = merges_.find(pair_of(symbol.id, right));
    if (merge == merges_.end()) return;
    scratch.queue.push_back({merge->second.rank, static_cast<std::int32_t>(left), symbol.id, right, merge->second.merged});
    std::push_heap(scratch.queue.begin(), scratch.queue.end(), is_later);
}

/// Call `add` with the ids that a word starts from.
template <typename Add>
void Bpe::each_symbol(std::string_view word, Add add) const {
    for (std::size_t at = 0; at < word.size();) {
        const std::size_t start = at;
        if (characters_.empty()) {
            ++at;
        } else if (const auto character = characters_.find(utf8::next(word, at)); character != characters_.end()) {
            add(character->second);
            continue;
        }
        for (const char byte : word.substr(start, at - start)) add(byte_ids_[static_cast<unsigned char>(byte)]);
    }
}

void Bpe::encode(std::string_view word, Scratch& scratch, std::vector<std::int64_t>& ids) const {
    if (!whole_.empty()) {
        scratch.key.assign(word);
        if (const auto token = whole_.find(scratch.key); token != whole_.end()) return ids.push_back(token->second);
    }
    auto& symbols = scratch.symbols;
    auto& queue = scratch.queue;
    symbols.clear();
    queue.clear();
    each_symbol(word, [&](std::int32_t id) {
        const auto position = static_cast<std::int32_t>(symbols.size());
        if (id != no_token) symbols.push_back({id, position - 1, position + 1});
    });
    if (symbols.empty()) return;
    symbols.back().next = -1;
    for (std::size_t i = 0; i < symbols.size(); ++i) propose(scratch, i);
    while (!queue.empty()) {
        std::pop_heap(queue.begin(), queue.end(), is_later);
        const Scratch::Candidate best = queue.back();
        queue.pop_back();
        const auto at = static_cast<std::size_t>(best.position);
        Scratch::Symbol& left = symbols[at];
        if (left.id != best.left || left.next < 0) continue;
        Scratch::Symbol& right = symbols[static_cast<std::size_t>(left.next)];
        if (right.id != best.right) continue;
        left.id = best.merged;
        left.next = right.next;
        right.id = no_token;
        if (left.next >= 0) symbols[static_cast<std::size_t>(left.next)].previous = best.position;
        propose(scratch, at);
        if (left.previous >= 0) propose(scratch, static_cast<std::size_t>(left.previous));
    }
    for (std::int32_t at = 0; at >= 0; at = symbols[static_cast<std::size_t>(at)].next)
        ids.push_back(symbols[static_cast<std::size_t>(at)].id);
}

} // namespace mars
