#include "structured/vocabulary.hpp"

#include <algorithm>
#include <numeric>

#include "text/utf8.hpp"

namespace mars {

Vocabulary::Vocabulary(Tokenizer tokenizer, std::int64_t vocab_size) : tokenizer_(std::move(tokenizer)) {
    for (std::int64_t token = 0; token < vocab_size; ++token) texts_.emplace_back(tokenizer_.bytes_of(token));
    by_length.resize(texts_.size());
    std::iota(by_length.begin(), by_length.end(), std::int64_t{0});
    for (const std::int64_t token : by_length) {
        longest = std::max(longest, text(token).size());
        if (!text(token).empty()) {
            sorted.push_back(token);
            first_.emplace(text(token), token);
        }
    }
    std::stable_sort(sorted.begin(), sorted.end(), [this](std::int64_t a, std::int64_t b) { return text(a) < text(b); });
    std::stable_sort(by_length.begin(), by_length.end(), [this](std::int64_t a, std::int64_t b) {
        const std::string_view one = text(a), other = text(b);
        if (one.substr(0, 1) != other.substr(0, 1)) return one.substr(0, 1) < other.substr(0, 1);
        return one.size() != other.size() ? one.size() < other.size() : one < other;
    });
    for (std::size_t i = 0; i < sorted.size(); ++i) {
        const std::string_view own = text(sorted[i]), before = i > 0 ? text(sorted[i - 1]) : std::string_view();
        const auto end = own.begin() + static_cast<std::ptrdiff_t>(std::min(own.size(), before.size()));
        alike.push_back(static_cast<std::uint32_t>(std::mismatch(own.begin(), end, before.begin()).first - own.begin()));
    }
}

std::vector<std::int64_t> Vocabulary::write(std::string_view data) const {
    std::vector<std::int64_t> ids;
    while (!data.empty()) {
        const std::size_t good = utf8::valid_prefix(data);
        if (good > 0) {
            const std::vector<std::int64_t> part = tokenizer_.encode_within(data.substr(0, good));
            ids.insert(ids.end(), part.begin(), part.end());
        }
        std::size_t bad = good;
        while (bad < data.size() && utf8::valid_prefix(data.substr(bad, 4)) == 0) ++bad;
        greedy(data.substr(good, bad - good), ids);
        data.remove_prefix(bad);
    }
    return ids;
}

void Vocabulary::greedy(std::string_view data, std::vector<std::int64_t>& ids) const {
    while (!data.empty()) {
        std::size_t size = std::min(data.size(), longest);
        while (size > 0 && first_.count(data.substr(0, size)) == 0) --size;
        if (size > 0) ids.push_back(first_.at(data.substr(0, size)));
        data.remove_prefix(std::max(size, std::size_t{1})); // a byte without a token is dropped
    }
}

std::vector<std::int64_t> Vocabulary::beginnings(std::string_view data) const {
    std::vector<std::int64_t> fits;
    for (std::size_t size = std::min(data.size(), longest); size > 0; --size)
        if (const auto token = first_.find(data.substr(0, size)); token != first_.end()) fits.push_back(token->second);
    return fits;
}

} // namespace mars
