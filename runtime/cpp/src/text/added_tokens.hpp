// Finds added tokens in a text: the leftmost match, the longest of those.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mars {

/// Finds any of a set of texts in another text.
class AddedTokens {
  public:
    struct Match {
        std::size_t start, length; // in bytes
        std::int64_t id;
    };

    AddedTokens() = default;

    /// Texts with their ids; each text once and not empty.
    explicit AddedTokens(std::vector<std::pair<std::string, std::int64_t>> tokens);

    bool empty() const { return tokens_.empty(); }

    /// The first match at or after `from`; length 0 if there is none.
    Match find(std::string_view text, std::size_t from) const;

  private:
    Match longest(std::string_view text, std::size_t start) const;

    std::vector<std::pair<std::string, std::int64_t>> tokens_; // sorted
    bool starts_[256] = {};
};

} // namespace mars
