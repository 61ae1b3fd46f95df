// Block commit, the paper's cache loop: whole blocks are committed, and rows wait for each other at block boundaries.
#pragma once

#include "decode/schedule.hpp"

namespace mars {

/// Decode `rows` with block commit. `backend` and `rows` must outlive the result. Throws SessionError if a block does
/// not fit a step, and for exact rows.
///
/// The cache holds whole blocks of `cache_block` tokens. An inner step feeds the block's accepted tokens and then masks
/// against the frozen cache; masks never reach past the block's end. When every row's block is full, one more forward
/// writes the blocks into the cache; its last output predicts the first token of the next block.
std::unique_ptr<Run> decode_blocks(Backend& backend, const std::vector<Row*>& rows, std::int64_t block, std::int64_t mask_id,
                                   std::int64_t cache_block);

} // namespace mars
