// A loaded engine, its execution contexts, and RTX's file of compiled kernels. Only engine.cpp uses TensorRT.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bundle/bundle.hpp"
#include "device/trt/cuda.hpp"

namespace mars {

/// The manifest's name of the TensorRT this library was built with: `tensorrt` or `tensorrt_rtx`.
std::string tensorrt_flavor();

/// The version of the loaded TensorRT, such as `10.16.0.72`.
std::string tensorrt_version();

/// An execution context: shapes and addresses of one kind of step. Setters return false if the engine refuses.
class Context {
  public:
    struct Held;
    explicit Context(std::unique_ptr<Held> held);
    ~Context();
    Context(Context&&) noexcept;
    Context& operator=(Context&&) noexcept;

    bool set_input_shape(const std::string& name, const std::vector<std::int64_t>& shape);
    bool set_tensor_address(const std::string& name, Address address);

    /// Whether the step can be captured as a graph, as far as TensorRT can tell.
    bool is_capturable(void* stream) const;

    /// Put the step on a stream.
    bool enqueue(void* stream);

  private:
    std::unique_ptr<Held> held_;
};

/// An input or output of an engine. `dtype` as in a manifest, "" for other types. -1 in `shape` if symbolic. `alias`:
/// the input whose memory an output writes, "" if none or unknown to this TensorRT.
struct EngineTensor {
    std::string name, dtype;
    std::vector<std::int64_t> shape;
    std::string alias;
};

/// An engine in device memory.
class LoadedEngine {
  public:
    /// Load a variant's engine on `gpu`, which must be current; `on_log` receives TensorRT's log. Throws SessionError
    /// that names what it was built for and what this machine has.
    LoadedEngine(const Bundle& bundle, const Variant& variant, int gpu, OnLog on_log = nullptr);
    ~LoadedEngine();

    std::vector<EngineTensor> tensors() const;

    /// Bytes of working memory, shared by all contexts, one step at a time.
    std::size_t scratch_bytes() const;

    /// A context for one optimization profile. Throws SessionError if TensorRT refuses.
    Context new_context(std::size_t range_index, Address scratch, void* stream) const;

    /// TensorRT's latest error message.
    std::string last_error() const;

    /// Write RTX's compiled kernels to the file beside the bundle if there are new ones, so that the next start is
    /// fast.
    void keep_kernels();

  private:
    struct Loaded;
    std::unique_ptr<Loaded> loaded_;
};

} // namespace mars
