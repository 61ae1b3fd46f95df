#include "attention_avx2.hpp"

namespace {

struct AvxVnni : Avx2Lanes {
    static Vector add_products(Vector sums, Vector pairs, Vector two) { return _mm256_dpwssd_avx_epi32(sums, pairs, two); }
};

} // namespace

namespace mars::kernels {
const AttentionCode attention_avx_vnni{"avx_vnni", AvxVnni::QUERIES, write, attend_tile<AvxVnni>};
}
