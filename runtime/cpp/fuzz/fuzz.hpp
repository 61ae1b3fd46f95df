// The parts of a fuzzing program, and odd values made from its bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

/// Initial inputs, some of them larger than 4 KiB.
std::vector<std::string> seeds();

/// Report a finding unless `good`. Unlike assert, it is active in every build.
inline void require(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "not so: %s\n", what);
    std::abort();
}

/// The bytes of an input, one value after the other; zeros after its end.
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

    /// Mostly small numbers, and those at which arithmetic overflows.
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

    /// Mostly fractions of 1, and NaN, infinities and values out of range.
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

    /// Any bytes: a length, and that many of the remaining bytes.
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
