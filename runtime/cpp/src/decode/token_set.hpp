// A set of tokens of a vocabulary, one bit each.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mars {

class TokenSet {
  public:
    TokenSet() = default;
    explicit TokenSet(std::int64_t vocab_size) : bits_((static_cast<std::size_t>(vocab_size) + 63) / 64), size_(vocab_size) {}

    bool has(std::int64_t token) const {
        return token >= 0 && token < size_ && (bits_[static_cast<std::size_t>(token) / 64] >> (token % 64) & 1U) != 0;
    }

    /// Tokens outside the vocabulary are ignored.
    void set(std::int64_t token, bool is_in = true) {
        if (token < 0 || token >= size_) return;
        const std::uint64_t bit = std::uint64_t{1} << (token % 64);
        std::uint64_t& word = bits_[static_cast<std::size_t>(token) / 64];
        word = is_in ? word | bit : word & ~bit;
    }

    bool any() const {
        return std::any_of(bits_.begin(), bits_.end(), [](std::uint64_t word) { return word != 0; });
    }

    /// Size of the vocabulary.
    std::int64_t size() const { return size_; }

  private:
    std::vector<std::uint64_t> bits_;
    std::int64_t size_ = 0;
};

} // namespace mars
