// What a fuzzing program is made of, and odd values out of its bytes. Knows no library under test.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

/// Inputs to begin with, some of them above 4 KiB.
std::vector<std::string> seeds();

/// A finding, unless `good`. Not assert: it holds in every build.
inline void require(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "not so: %s\n", what);
    std::abort();
}

/// The bytes of an input, one value after the other; zeros behind its end.
class Bytes {
  public:
    Bytes(const std::uint8_t* data, std::size_t size) : left_(reinterpret_cast<const char*>(data), size) {}

    bool is_over() const { return left_.empty(); }

    std::uint8_t byte() {
        if (left_.empty()) return 0;
        const auto first = static_cast<std::uint8_t>(left_.front());
        left_.remove_prefix(1);
        return first;
    }

    /// 0 ... most - 1
    std::size_t below(std::size_t most) { return byte() % most; }

    bool flag() { return byte() % 2 == 1; }

    /// Small numbers mostly, and those at which arithmetic ends.
    std::int64_t integer() {
        using Ends = std::numeric_limits<std::int64_t>;
        static constexpr std::int64_t odd[] = {
            Ends::min(), Ends::max(), Ends::max() - 1, -1, -2, std::int64_t{1} << 31, std::int64_t{1} << 53, (std::int64_t{1} << 32) - 1,
            256,         65536};
        const std::uint8_t kind = byte();
        if (kind < 200) return kind % 40;
        if (kind < 230) return odd[kind % std::size(odd)];
        return raw<std::int64_t>();
    }

    /// Fractions of 1 mostly, and what is no number or none that fits.
    double real() {
        using Ends = std::numeric_limits<double>;
        static constexpr double odd[] = {
            Ends::infinity(), -Ends::infinity(), Ends::quiet_NaN(), Ends::max(), Ends::denorm_min(), -1.0, -0.0, 1e18, 1e9, 2.0};
        const std::uint8_t kind = byte();
        if (kind < 200) return static_cast<double>(kind % 101) / 100.0;
        if (kind < 230) return odd[kind % std::size(odd)];
        return raw<double>();
    }

    template <typename T>
    T raw() {
        T value{};
        const std::size_t size = std::min(sizeof value, left_.size());
        std::memcpy(&value, left_.data(), size);
        left_.remove_prefix(size);
        return value;
    }

    /// Any bytes: a length, and as many of what is left.
    std::string text(std::size_t most = 4096) {
        std::size_t size = byte();
        if (size >= 250) size = (size - 249) * 512; // long ones, too
        size = std::min({size, most, left_.size()});
        const std::string found(left_.substr(0, size));
        left_.remove_prefix(size);
        return found;
    }

    std::string_view rest() const { return left_; }

  private:
    std::string_view left_;
};
