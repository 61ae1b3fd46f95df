#include "attention_avx2.hpp"

namespace {

struct Avx2 : Avx2Lanes {
    static Vector add_products(Vector sums, Vector pairs, Vector two) { return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, two)); }
};

} // namespace

namespace mars::kernels {
const AttentionCode attention_avx2{"avx2", Avx2::QUERIES, write, attend_tile<Avx2>};
}
