#include "attention_avx512.hpp"

namespace mars::kernels {
const AttentionCode attention_avx512_vnni{"avx512_vnni", Avx512Vnni::QUERIES, write, attend_tile<Avx512Vnni>};
}
