// Memory of the device that a session computes on, and copies there: ONNX Runtime has no call for these that works on every device, so each is
// a graph of one operator for every tensor, bound by address. Knows no model. Twin of runtime/device/ort_memory.py.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device/copy_graph.hpp"
#include "device/ort_api.hpp"
#include "device/ort_kept.hpp"
#include "device/ort_place.hpp"
#include "device/worker.hpp"

namespace mars {

/// Memory of one allocator, given back at the end.
class OrtBlock {
  public:
    OrtBlock() = default;
    OrtBlock(std::shared_ptr<Ort::Allocator> allocator, std::size_t num_bytes);
    ~OrtBlock() { release(); }
    OrtBlock(OrtBlock&& other) noexcept { *this = std::move(other); }
    OrtBlock& operator=(OrtBlock&& other) noexcept;

    /// An address that may be one of a device: not to be read.
    unsigned char* data() const { return data_; }
    std::size_t size() const { return size_; }

  private:
    void release() noexcept;

    std::shared_ptr<Ort::Allocator> allocator_;
    unsigned char* data_ = nullptr;
    std::size_t size_ = 0;
};

/// `count` runs of `length` elements, one behind the other.
struct OrtRuns {
    std::int64_t count, length;
};

class OrtMemory {
  public:
    using Pair = std::pair<const unsigned char*, unsigned char*>; ///< source, target

    /// Of `graph`'s device. `add_provider` makes other sessions compute there, too. KV elements are of `type`.
    ///
    /// `worker`: of a graph whose steps are captured. Everything is done in its thread then, KV memory that is given up comes again at the
    /// same addresses, and all memory is of an allocator of its own: a captured step writes where its intermediate results were, which the
    /// graph's allocator has long given to others.
    ///
    /// Throws Ort::Exception where the session has no such memory.
    OrtMemory(std::shared_ptr<OrtGraph> graph, const OrtPlace& place, std::function<void(Ort::SessionOptions&)> add_provider,
              ONNXTensorElementDataType type, std::int64_t element_bytes, std::shared_ptr<Worker> worker = nullptr);

    OrtBlock allocate(std::size_t num_bytes);

    /// Host memory that is locked where the device can lock it.
    OrtBlock staging(std::size_t num_bytes);

    /// `count` KV tensors of some rows, `num_bytes` each; what they hold is not known.
    std::vector<OrtBlock> allocate_rows(std::size_t count, KvShape shape, std::size_t num_bytes);

    /// Take them back. Any thread.
    void give_up(KvShape shape, std::vector<OrtBlock> blocks);

    /// Whether steps are captured.
    bool captures() const { return worker_ != nullptr; }

    Ort::Value tensor(unsigned char* address, std::size_t num_bytes, const std::vector<std::int64_t>& shape,
                      ONNXTensorElementDataType type) const;
    Ort::Value host_tensor(unsigned char* address, std::size_t num_bytes, const std::vector<std::int64_t>& shape,
                           ONNXTensorElementDataType type) const;

    /// All of each, `num_bytes` long, in one run. Sources and targets do not overlap.
    void copy(const std::vector<Pair>& pairs, std::size_t num_bytes);

    /// Of each the beginning of every run where the target's are shorter, else all of it with zeros behind.
    void pad(const std::vector<Pair>& pairs, OrtRuns from, OrtRuns to);

    /// `is_staged`: what is on the host is of `staging`.
    void upload(unsigned char* target, const unsigned char* source, std::size_t num_bytes, bool is_staged = false);
    void download(unsigned char* target, const unsigned char* source, std::size_t num_bytes, bool is_staged = false);

    ONNXTensorElementDataType type() const { return type_; }
    std::int64_t element_bytes() const { return element_bytes_; }

    std::atomic<std::uint64_t> sent{0}, fetched{0}; ///< bytes between host and device

  private:
    const std::shared_ptr<Ort::Session>& copies(CopyKind kind, std::size_t count);
    void run_pad(const std::vector<Pair>& pairs, OrtRuns from, OrtRuns to);
    Ort::Value on_host(unsigned char* address, std::size_t num_bytes, bool is_staged) const;

    std::shared_ptr<OrtGraph> graph_;
    std::function<void(Ort::SessionOptions&)> add_provider_;
    ONNXTensorElementDataType type_;
    std::int64_t element_bytes_;
    Ort::MemoryInfo bound_, pageable_, staged_;
    std::shared_ptr<Ort::Allocator> rows_, host_;
    std::mutex mutex_;
    std::map<std::pair<CopyKind, std::size_t>, std::shared_ptr<Ort::Session>> sessions_;
    const std::shared_ptr<Worker> worker_;
    KeptBlocks kept_;
};

} // namespace mars
