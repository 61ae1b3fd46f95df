#include "decode/prefix.hpp"

#include <algorithm>

namespace mars {

namespace {

constexpr std::int64_t spare = 64; // entries reserved after a prompt, because the first steps need them
// With recurrent states. The next prompt of a chat may differ from `tail` tokens before the end on, where the template began the answer. A
// copy of the states takes as long as reading a few tokens.
constexpr std::int64_t tail = 8, least_copied = 32;

using Key = std::pair<Group, Ids>;

Ids first(const Ids& ids, std::int64_t length) { return {ids.begin(), ids.begin() + length}; }

/// Length of the common beginning; 0 in different groups.
std::int64_t num_shared(const Key& one, const Key& other) { return one.first == other.first ? num_common(one.second, other.second) : 0; }

/// Whether `key` begins with `beginning`, which is not empty.
bool begins_with(const Key& key, const Key& beginning) {
    return num_shared(key, beginning) == static_cast<std::int64_t>(beginning.second.size());
}

/// How many of `num_common` saved entries a sequence can begin with, whose last chunk begins at `last`: the steps that it then takes must
/// give the bits that reading all chunks gives.
std::int64_t usable(std::int64_t num_common, std::int64_t last, std::int64_t chunk, std::optional<std::int64_t> reproducible_slots) {
    if (num_common < 0) return 0;
    if (!reproducible_slots) return num_common - num_common % chunk;
    if (num_common >= last) return num_common;
    return num_common - std::max(std::int64_t{0}, *reproducible_slots - (chunk - num_common % chunk)); // so that the rest of the chunk is
}

} // namespace

std::int64_t num_common(const Ids& one, const Ids& other) {
    const auto end = one.begin() + static_cast<std::ptrdiff_t>(std::min(one.size(), other.size()));
    return std::mismatch(one.begin(), end, other.begin()).first - one.begin();
}

PrefixCache::PrefixCache(std::int64_t bytes, std::optional<std::int64_t> slots, bool recurrent)
    : budget(bytes), reproducible_slots(slots), is_recurrent(recurrent) {}

PrefixStats PrefixCache::stats() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    PrefixStats now = counts_;
    now.entries = static_cast<std::int64_t>(order_.size());
    now.num_bytes = num_bytes_;
    return now;
}

std::shared_ptr<PrefixHandle> PrefixCache::handle(std::string salt, std::vector<std::int64_t> marks) {
    return budget > 0 ? std::make_shared<PrefixHandle>(*this, std::move(salt), std::move(marks)) : nullptr;
}

void PrefixCache::clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (!order_.empty()) drop(*order_.front());
}

void PrefixCache::count(std::int64_t query_tokens, std::int64_t hit_tokens) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++counts_.queries;
    counts_.hits += hit_tokens > 0;
    counts_.query_tokens += query_tokens;
    counts_.hit_tokens += hit_tokens;
}

std::optional<PrefixCache::Match> PrefixCache::match(const Group& group, const Ids& ids, const std::vector<std::int64_t>& marks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto [length, best] = is_recurrent ? longest({group, ids}) : nearest({group, ids});
    if (length <= 0) return std::nullopt;
    // Prefer an entry of exactly this length, so that longer ones can age.
    if (const auto exact = entries_.find({group, first(ids, length)}); exact != entries_.end()) best = exact;
    use(best->second);
    for (const std::int64_t mark : marks) { // after the entry that contains it, so that the shared part is kept longest
        const auto marked = entries_.find({group, first(ids, std::min(mark, static_cast<std::int64_t>(ids.size())))});
        if (marked != entries_.end()) use(marked->second);
    }
    return Match{best->second.saved, length};
}

/// The longest common beginning of an entry with `key`.
std::pair<std::int64_t, PrefixCache::Entries::iterator> PrefixCache::nearest(const Key& key) {
    const auto best = entries_.lower_bound(key); // this one or the one before it
    const std::int64_t length = best == entries_.end() ? 0 : num_shared(best->first, key);
    if (best != entries_.begin())
        if (const std::int64_t before = num_shared(std::prev(best)->first, key); before > length) return {before, std::prev(best)};
    return {length, best};
}

/// The longest entry that `key` begins with.
std::pair<std::int64_t, PrefixCache::Entries::iterator> PrefixCache::longest(Key key) {
    for (auto next = entries_.upper_bound(key); next != entries_.begin(); next = entries_.upper_bound(key)) {
        const auto before = std::prev(next);
        const std::int64_t length = num_shared(before->first, key);
        if (length == 0) break;
        if (begins_with(key, before->first)) return {length, before};
        key.second.resize(static_cast<std::size_t>(length));
    }
    return {0, entries_.end()};
}

std::vector<std::tuple<Group, Ids, bool>> PrefixCache::held() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::tuple<Group, Ids, bool>> all;
    for (const Key* key : order_) all.emplace_back(key->first, key->second, entries_.at(*key).fixed);
    return all;
}

void PrefixCache::save(const Group& group, const Ids& ids, std::int64_t num_bytes,
                       const std::function<std::shared_ptr<const Saved>()>& copy, bool fixed) {
    const Key key{group, ids};
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (ids.empty() || num_bytes > budget || is_there(key, fixed)) return;
        drop_beginning(key);
        while (!order_.empty() && num_bytes_ + num_bytes > budget) {
            drop(*order_.front());
            ++counts_.evicted;
        }
        if (num_bytes_ + num_bytes > budget) return; // other sequences are copying
        num_bytes_ += num_bytes;
    }
    std::shared_ptr<const Saved> saved;
    try {
        saved = copy();
    } catch (const std::exception&) { // out of memory, for example: the answer does not depend on it
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    num_bytes_ -= num_bytes;
    if (!saved) {
        ++counts_.failed;
    } else if (!is_there(key, fixed)) { // another sequence may have saved it meanwhile
        drop_beginning(key);
        const auto entry = entries_.emplace(key, Entry{std::move(saved), num_bytes, fixed, {}}).first;
        entry->second.age = order_.insert(order_.end(), &entry->first);
        num_bytes_ += num_bytes;
        ++counts_.saved;
    }
}

bool PrefixCache::is_there(const Key& key, bool fixed) {
    const auto at = entries_.lower_bound(key); // the next entry, if any, that begins with `key`
    if (at == entries_.end() || (fixed || is_recurrent ? at->first != key : !begins_with(at->first, key))) return false;
    at->second.fixed = at->second.fixed || fixed;
    use(at->second);
    return true;
}

/// Drop the entry that `key` begins with. It is the previous entry, since all entries in between begin with it too.
void PrefixCache::drop_beginning(const Key& key) {
    const auto at = entries_.lower_bound(key);
    if (at == entries_.begin()) return;
    const auto before = std::prev(at);
    if (begins_with(key, before->first) && !before->second.fixed) drop(before->first);
}

void PrefixCache::drop(const Key& key) {
    const auto at = entries_.find(key);
    num_bytes_ -= at->second.num_bytes;
    order_.erase(at->second.age);
    entries_.erase(at);
}

std::int64_t PrefixHandle::lookup(Cache& cache, std::int64_t place, const Ids& tokens, std::int64_t chunk, std::int64_t capacity,
                                  std::optional<std::int64_t> max_entries, const std::vector<std::int64_t>& lengths) {
    const std::optional<std::int64_t> reproducible_slots = prefixes_.reproducible_slots;
    if (reproducible_slots && chunk < *reproducible_slots) return 0; // its steps compute other bits than the saved entries have
    const std::int64_t block_size = reproducible_slots ? 1 : chunk;
    group_ = Group{salt_, block_size};
    const auto size = static_cast<std::int64_t>(tokens.size());
    const std::int64_t last = (size - 1) / chunk * chunk; // where the last chunk begins
    const std::int64_t most = reproducible_slots ? std::max(last, size - *reproducible_slots) : last;
    if (prefixes_.is_recurrent) {
        marks_.push_back(size - tail);
        for (std::int64_t& mark : marks_) mark = usable(std::min(mark, most), last, chunk, reproducible_slots);
        stops_ = marks_;
    } else {
        for (std::int64_t& mark : marks_) mark = mark / block_size * block_size;
    }
    std::int64_t num_loaded = 0;
    if (const auto match = prefixes_.match(*group_, first(tokens, most), marks_)) {
        std::int64_t length = usable(match->length, last, chunk, reproducible_slots);
        if (prefixes_.is_recurrent && length < match->saved->length) length = 0;
        try {
            if (length > 0) {
                const Saved& saved = *match->saved;
                const std::int64_t own = std::min(size + spare, capacity), present = cache.capacity();
                const bool is_wide = saved.length > std::max(own, present);
                if (!is_wide || !max_entries || bucket(saved.length, present) <= *max_entries) {
                    cache.reserve(std::max(saved.length, own), lengths);
                    cache.load(place, saved, length);
                    num_loaded = copied_ = length;
                }
            }
        } catch (const std::exception&) { // out of memory, for example: the sequence then reads its whole prompt
        }
    }
    prefixes_.count(size, num_loaded);
    return num_loaded;
}

std::optional<std::int64_t> PrefixHandle::stop(std::int64_t cursor) const {
    std::optional<std::int64_t> first;
    for (const std::int64_t at : stops_)
        if (is_worth(at) && at >= cursor + prefixes_.reproducible_slots.value_or(1)) first = std::min(at, first.value_or(at));
    return first;
}

bool PrefixHandle::is_worth(std::int64_t length) const { return !prefixes_.is_recurrent || length >= copied_ + least_copied; }

void PrefixHandle::store(Cache& cache, std::int64_t place, const Ids& tokens, std::int64_t num_reproducible) {
    if (!group_) return;
    const auto give = [&](std::int64_t length, bool fixed) {
        if (length < 1 || length > num_reproducible || !is_worth(length)) return;
        const std::optional<std::int64_t> num_bytes = cache.copy_bytes(place, length);
        if (!num_bytes) return;
        prefixes_.save(*group_, first(tokens, length), *num_bytes, [&] { return cache.save(place, length); }, fixed);
        copied_ = length;
    };
    for (const std::int64_t mark : marks_) give(mark, true);
    give(num_reproducible, false);
}

} // namespace mars
