// SHA-256 (FIPS 180-4): our own, so that a bundle can be checked without a cryptographic library, or libcrypto's where there is one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace mars {

/// Whose code it is; the digests are the same. The system's, for much data, is several times as fast.
enum class Hasher { own, system };

class Sha256 {
  public:
    /// `system` without a libcrypto is our own.
    explicit Sha256(Hasher hasher = Hasher::own);

    void add(std::string_view data);

    /// The digest of everything added, in lower-case hex. Call it once.
    std::string hex();

  private:
    void compress(const unsigned char* block);

    std::unique_ptr<void, void (*)(void*)> system_; // libcrypto's context, if it is that

    std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<unsigned char, 64> partial_{};
    std::size_t num_partial_ = 0;
    std::uint64_t num_bytes_ = 0;
};

} // namespace mars
