// A small model's proposals for a large one (paper, section 4.6): it decodes ahead at a tau, the large one verifies.
// Knows the small model through its backend only, and nothing of the large one but the tokens it has settled.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/batch.hpp"
#include "decode/proposals.hpp"

namespace mars {

/// One row of the small model, kept in step with one row of the large one.
///
/// Its KV entries stay valid as far as the tokens agree; the rest is written again. Throws what the backend throws.
class Draft : public Proposer {
  public:
    /// `backend` outlives this.
    Draft(Backend& backend, std::int64_t block, std::int64_t mask_id, std::vector<std::int64_t> eos_ids);

    /// Up to about six tokens that the small model would say; none where its context is full.
    Proposals propose(const std::vector<std::int64_t>& tokens, std::int64_t most) override;

  private:
    std::int64_t block_;
    std::vector<std::int64_t> eos_ids_;
    Row row_;
    Batch batch_;
};

} // namespace mars
