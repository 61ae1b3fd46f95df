// No Python file: SHA-256 (FIPS 180-4), so that no cryptographic library is needed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace mars {

class Sha256 {
  public:
    void add(std::string_view data);

    /// The digest of everything added, in lower-case hex. May be called once.
    std::string hex();

  private:
    void compress(const char* block);

    std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<char, 64> partial_{};
    std::size_t num_partial_ = 0;
    std::uint64_t num_bytes_ = 0;
};

/// The digest of `data`, in lower-case hex.
inline std::string sha256(std::string_view data) {
    Sha256 digest;
    digest.add(data);
    return digest.hex();
}

} // namespace mars
