// runtime/decode/prefix.py: the prefix cache: KV entries of earlier prompts and answers by their token ids.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <mars/stats.hpp>

#include "decode/backend.hpp"

namespace mars {

/// Which requests share entries: the salt, and the size of prefill chunks if entries depend on it (else 1).
using Group = std::pair<std::string, std::int64_t>;
using Ids = std::vector<std::int64_t>;

/// Length of the common beginning of two lists.
std::int64_t num_common(const Ids& one, const Ids& other);

class PrefixHandle;

/// Entries of at most `budget` bytes; the least recently used are evicted first. Thread-safe.
///
/// `reproducible_slots` is the backend's. `is_recurrent`: entries have recurrent states, so only all of an entry is used. An evicted entry
/// lives on while it is being copied.
class PrefixCache {
  public:
    struct Match {
        std::shared_ptr<const Saved> saved;
        std::int64_t length = 0;
    };

    PrefixCache(std::int64_t budget, std::optional<std::int64_t> reproducible_slots, bool is_recurrent = false);

    const std::int64_t budget;
    const std::optional<std::int64_t> reproducible_slots;
    const bool is_recurrent;

    PrefixStats stats() const;

    /// A sequence's access to the cache; null without a budget. `marks`: lengths of its prompt that other prompts may begin
    /// with. The cache must outlive it.
    std::shared_ptr<PrefixHandle> handle(std::string salt = "", std::vector<std::int64_t> marks = {});
    void clear();
    void count(std::int64_t query_tokens, std::int64_t hit_tokens);

    /// The entry with the longest common beginning with `ids`, and its length; no value if there is none. Entries of
    /// the lengths `marks` count as used too.
    std::optional<Match> match(const Group& group, const Ids& ids, const std::vector<std::int64_t>& marks = {});

    /// All entries, least recently used first: group, ids, whether fixed. For tests.
    std::vector<std::tuple<Group, Ids, bool>> held() const;

    /// Add what `copy` returns, unless it is there already or does not fit. A failing copy is only counted. A `fixed`
    /// entry is kept when a longer entry that begins with it is added.
    void save(const Group& group, const Ids& ids, std::int64_t num_bytes, const std::function<std::shared_ptr<const Saved>()>& copy,
              bool fixed = false);

  private:
    using Key = std::pair<Group, Ids>;
    struct Entry {
        std::shared_ptr<const Saved> saved;
        std::int64_t num_bytes;
        bool fixed;
        std::list<const Key*>::iterator age;
    };

    using Entries = std::map<Key, Entry>; // sorted, so neighbours of a group have common beginnings

    // with the lock held:
    std::pair<std::int64_t, Entries::iterator> nearest(const Key& key);
    std::pair<std::int64_t, Entries::iterator> longest(Key key);
    bool is_there(const Key& key, bool fixed);
    void use(Entry& entry) { order_.splice(order_.end(), order_, entry.age); }
    void drop_beginning(const Key& key);
    void drop(const Key& key);

    mutable std::mutex mutex_;
    Entries entries_;
    std::list<const Key*> order_; // most recently used last
    std::int64_t num_bytes_ = 0;  // of all entries, including those being copied
    PrefixStats counts_;
};

/// The exchange of one sequence with the prefix cache. Used by the thread that runs the sequence.
class PrefixHandle {
  public:
    PrefixHandle(PrefixCache& prefixes, std::string salt, std::vector<std::int64_t> marks)
        : prefixes_(prefixes), salt_(std::move(salt)), marks_(std::move(marks)) {}

    /// Load the saved entries of `tokens` and return how many. At least one token is always left to feed.
    ///
    /// The rest takes exactly the steps, or reproducible ones, of a sequence that begins at 0 and reads by `chunk`. A long entry is
    /// not loaded if sequences that wide would exceed `max_entries`. `lengths`: of the rows, as in Cache::reserve.
    std::int64_t lookup(Cache& cache, std::int64_t place, const Ids& tokens, std::int64_t chunk, std::int64_t capacity,
                        std::optional<std::int64_t> max_entries = std::nullopt, const std::vector<std::int64_t>& lengths = {});

    /// Where the chunk of the prompt that begins at `cursor` must end at the latest, because `store` copies the states there; no value
    /// for no such place.
    std::optional<std::int64_t> stop(std::int64_t cursor) const;

    /// Give the cache the sequence's reproducible entries, and the marked beginnings as entries of their own. Recurrent states are
    /// saved where the row's now are.
    void store(Cache& cache, std::int64_t place, const Ids& tokens, std::int64_t num_reproducible);

  private:
    bool is_worth(std::int64_t length) const;

    PrefixCache& prefixes_;
    std::string salt_;
    std::vector<std::int64_t> marks_;
    std::optional<Group> group_; // set when the sequence begins
    // With recurrent states: where they are copied, and the tokens of the last copy, loaded or made.
    std::vector<std::int64_t> stops_;
    std::int64_t copied_ = 0;
};

} // namespace mars
