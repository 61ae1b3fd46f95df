// KV entries of what was read before, by its token ids. Twin of runtime/decode/prefix.py; knows no text, and devices by their caches only.
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

/// Who may share: the salt, and the size of the pieces where entries depend on it (else 1).
using Group = std::pair<std::string, std::int64_t>;
using Ids = std::vector<std::int64_t>;

class Stem;

/// Entries of at most `budget` bytes; the least recently used go first. May be used from any thread.
///
/// `firm_slots` as a backend says it. An entry that is being copied when it goes lives on until that is done.
class Prefixes {
  public:
    struct Match {
        std::shared_ptr<const Saved> saved;
        std::int64_t length = 0;
    };

    Prefixes(std::int64_t budget, std::optional<std::int64_t> firm_slots);

    const std::int64_t budget;
    const std::optional<std::int64_t> firm_slots;

    PrefixStats stats() const;

    /// A row's share; `marks`: lengths of its prompt that others may begin with. Nothing without a budget. The store outlives it.
    std::shared_ptr<Stem> stem(std::string salt = "", std::vector<std::int64_t> marks = {});

    /// Forget everything that was saved.
    void clear();

    /// Note what became of one prompt that was looked up.
    void count(std::int64_t query_tokens, std::int64_t hit_tokens);

    /// The entry that has most of the beginning of `ids`, and how much; nothing where none has any. Entries of the lengths `marks` are
    /// taken for used, too.
    std::optional<Match> match(const Group& group, const Ids& ids, const std::vector<std::int64_t>& marks = {});

    /// What is there, the least recently used first: salt and piece, ids, whether it is fixed. For tests.
    std::vector<std::tuple<Group, Ids, bool>> held() const;

    /// Take in what `copy` makes, unless it is there or has no room. What fails is counted, no more. A `fixed` entry stays when one comes
    /// that begins with it.
    void save(const Group& group, const Ids& ids, std::int64_t num_bytes, const std::function<std::shared_ptr<const Saved>()>& copy,
              bool fixed = false);

  private:
    struct Entry;
    using Entries = std::map<Ids, Entry>; // sorted: neighbours begin alike
    struct Place {
        const Group* group;
        const Ids* key;
    };
    struct Entry {
        std::shared_ptr<const Saved> saved;
        std::int64_t num_bytes;
        bool fixed;
        std::list<Place>::iterator age;
    };

    // with the lock held
    bool is_there(const Group& group, const Ids& key, bool fixed);
    void use(Entry& entry) { order_.splice(order_.end(), order_, entry.age); }
    void drop_beginning(const Group& group, const Ids& key);
    void drop(const Group& group, const Ids& key);

    mutable std::mutex mutex_;
    std::map<Group, Entries> groups_;
    std::list<Place> order_;     // the last is the latest used
    std::int64_t num_bytes_ = 0; // of the entries and of those that are being copied
    PrefixStats counts_;
};

/// What one row takes from the store and gives to it. Used by the thread that runs the row.
///
/// `firm` counts the row's leading entries that have the bits which any other row's would have: only they are given. Nothing behind the
/// row's cursor is among them.
class Stem {
  public:
    Stem(Prefixes& store, std::string salt, std::vector<std::int64_t> marks)
        : store_(store), salt_(std::move(salt)), marks_(std::move(marks)) {}

    /// Load what the store has of `tokens`, and return how many that is. Something is always left to feed.
    ///
    /// What is left takes the very steps, or firm ones, that a row takes which begins at 0 and reads by `piece`. A long entry is left
    /// alone where rows as wide would exceed `most_entries`.
    std::int64_t recall(Cache& cache, std::int64_t place, const Ids& tokens, std::int64_t piece, std::int64_t capacity,
                        std::optional<std::int64_t> most_entries = std::nullopt);

    /// A step of `slots` slots is about to run; `is_piece`: it reads a whole piece of a prompt.
    void feeds(std::int64_t cursor, std::int64_t slots, bool is_piece);

    /// It is done, and the row's cursor is where it left it.
    void moved(std::int64_t cursor);

    /// Give the store the row's firm entries, and the beginnings that are marked by themselves.
    void keep(Cache& cache, std::int64_t place, const Ids& tokens);

    std::int64_t firm() const { return firm_; }

  private:
    Prefixes& store_;
    std::string salt_;
    std::vector<std::int64_t> marks_;
    std::optional<Group> group_; // once the row has begun
    std::int64_t firm_ = 0;
    bool is_firm_ = false; // the step that runs goes on with what is firm
};

} // namespace mars
