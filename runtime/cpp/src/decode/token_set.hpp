// No Python file: a set of tokens of a vocabulary, one bit each (Python has numpy arrays).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mars {

class TokenSet {
  public:
    explicit TokenSet(std::int64_t vocab_size = 0) : bits_(static_cast<std::size_t>(vocab_size)) {}

    bool has(std::int64_t token) const { return token >= 0 && token < size() && bits_[static_cast<std::size_t>(token)]; }

    /// Tokens outside the vocabulary are ignored.
    void set(std::int64_t token, bool is_in = true) {
        if (token >= 0 && token < size()) bits_[static_cast<std::size_t>(token)] = is_in;
    }

    bool any() const { return std::find(bits_.begin(), bits_.end(), true) != bits_.end(); }
    std::int64_t size() const { return static_cast<std::int64_t>(bits_.size()); }

  private:
    std::vector<bool> bits_;
};

} // namespace mars
