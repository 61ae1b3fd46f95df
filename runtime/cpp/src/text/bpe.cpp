// Merges with a priority queue: each merge adds at most two new pairs, and outdated pairs are skipped.
#include "text/bpe.hpp"

#include <algorithm>
#include <utility>

#include "text/utf8.hpp"

namespace mars {

namespace {

constexpr std::uint64_t empty = ~std::uint64_t{0};

std::uint64_t pair_of(std::int32_t left, std::int32_t right) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
}

std::size_t hash(std::uint64_t pair) { return static_cast<std::size_t>(pair * 0x9E3779B97F4A7C15u >> 20); }

/// Order of a heap with the least element on top.
bool is_later(const Bpe::Scratch::Candidate& a, const Bpe::Scratch::Candidate& b) {
    return std::pair(a.rank, a.position) > std::pair(b.rank, b.position);
}

} // namespace

Bpe::Bpe(const std::array<std::int32_t, 256>& byte_ids, std::size_t num_merges) : byte_ids_(byte_ids) {
    std::size_t size = 16;
    while (size < 2 * num_merges) size *= 2;
    table_.assign(size, {empty, 0, no_token});
}

void Bpe::add_merge(std::int32_t left, std::int32_t right, std::int32_t merged) {
    const std::uint64_t pair = pair_of(left, right);
    std::size_t at = hash(pair) & (table_.size() - 1);
    while (table_[at].pair != empty && table_[at].pair != pair) at = (at + 1) & (table_.size() - 1);
    table_[at] = {pair, num_ranks_++, merged};
}

const Bpe::Merge* Bpe::find(std::int32_t left, std::int32_t right) const {
    const std::uint64_t pair = pair_of(left, right);
    std::size_t at = hash(pair) & (table_.size() - 1);
    while (table_[at].pair != empty) {
        if (table_[at].pair == pair) return &table_[at];
        at = (at + 1) & (table_.size() - 1);
    }
    return nullptr;
}

void Bpe::propose(Scratch& scratch, std::size_t left) const {
    const Scratch::Symbol& symbol = scratch.symbols[left];
    if (symbol.next < 0) return;
    const std::int32_t right = scratch.symbols[static_cast<std::size_t>(symbol.next)].id;
    if (const Merge* merge = find(symbol.id, right)) {
        scratch.queue.push_back({merge->rank, static_cast<std::int32_t>(left), symbol.id, right, merge->merged});
        std::push_heap(scratch.queue.begin(), scratch.queue.end(), is_later);
    }
}

/// Call `add` with the ids that a word starts from.
template <typename Add>
void Bpe::each_symbol(std::string_view word, Add add) const {
    for (std::size_t at = 0; at < word.size();) {
        const std::size_t start = at;
        if (characters_.empty()) {
            ++at;
        } else if (const auto found = characters_.find(utf8::next(word, at)); found != characters_.end()) {
            add(found->second);
            continue;
        }
        for (const char byte : word.substr(start, at - start)) add(byte_ids_[static_cast<unsigned char>(byte)]);
    }
}

void Bpe::encode(std::string_view word, Scratch& scratch, std::vector<std::int64_t>& ids) const {
    if (!whole_.empty()) {
        scratch.key.assign(word);
        if (const auto found = whole_.find(scratch.key); found != whole_.end()) return ids.push_back(found->second);
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
