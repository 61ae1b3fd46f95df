#include "bundle/sha256.hpp"

namespace mars {

namespace {

constexpr std::array<std::uint32_t, 64> constants{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr char digits[] = "0123456789abcdef";

std::uint32_t rotate(std::uint32_t value, unsigned count) { return (value >> count) | (value << (32U - count)); }

} // namespace

void Sha256::add(std::string_view data) {
    num_bytes_ += data.size();
    while (!data.empty()) {
        if (num_partial_ == 0 && data.size() >= partial_.size()) {
            compress(data.data());
            data.remove_prefix(partial_.size());
            continue;
        }
        const std::size_t taken = data.copy(partial_.data() + num_partial_, partial_.size() - num_partial_);
        num_partial_ += taken;
        data.remove_prefix(taken);
        if (num_partial_ == partial_.size()) {
            compress(partial_.data());
            num_partial_ = 0;
        }
    }
}

std::string Sha256::hex() {
    const std::uint64_t num_bits = num_bytes_ * 8;
    add(std::string(1, '\x80'));
    while (num_partial_ != 56) add(std::string(1, '\0'));
    std::string length;
    for (unsigned shift = 64; shift > 0;) {
        shift -= 8;
        length += static_cast<char>((num_bits >> shift) & 0xffU);
    }
    add(length);
    std::string text;
    for (const std::uint32_t word : state_)
        for (unsigned shift = 32; shift > 0;) {
            shift -= 4;
            text += digits[(word >> shift) & 15U];
        }
    return text;
}

void Sha256::compress(const char* block) {
    std::array<std::uint32_t, 64> w{};
    for (std::size_t i = 0; i < 64; ++i) w[i / 4] = w[i / 4] << 8U | static_cast<unsigned char>(block[i]);
    for (std::size_t i = 16; i < 64; ++i) {
        const std::uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3U);
        const std::uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10U);
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (std::size_t i = 0; i < 64; ++i) {
        const std::uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
        const std::uint32_t one = h + s1 + ((e & f) ^ (~e & g)) + constants[i] + w[i];
        const std::uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
        const std::uint32_t two = s0 + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
    }
    const std::array<std::uint32_t, 8> added{a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state_[i] += added[i];
}

} // namespace mars
