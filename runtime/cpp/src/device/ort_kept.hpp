// KV memory of a device that was given up, for rows of the same shape: captured steps write at addresses, which must come again. Twin of
// runtime/device/ort_kept.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <utility>
#include <vector>

namespace mars {

class OrtBlock;

constexpr std::size_t most_idle = 4;        ///< caches' worth of KV tensors that wait for the next cache of their shape
constexpr std::int64_t least_entries = 512; ///< of a row whose steps are captured

/// The capacity to grow to: few sizes, because each has captured steps of its own.
std::int64_t doubled(std::int64_t needed, std::int64_t present);

/// Rows, and entries of each.
struct KvShape {
    std::int64_t rows, entries;
    bool operator==(const KvShape& other) const { return rows == other.rows && entries == other.entries; }
};

/// All KV tensors of a cache, in the order in which they were made. Caches end in any thread; memory is taken in one.
class KeptBlocks {
  public:
    KeptBlocks();
    ~KeptBlocks();

    /// The latest that were given up in this shape, or none. Those that wait too long go.
    std::vector<OrtBlock> take(KvShape shape);

    void give(KvShape shape, std::vector<OrtBlock> blocks);

    /// Give all of it back to the device.
    void clear();

  private:
    std::mutex mutex_;
    std::list<std::pair<KvShape, std::vector<OrtBlock>>> idle_; // the latest last
};

} // namespace mars
