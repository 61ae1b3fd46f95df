// What a session and its steps take besides the KV memory, weighed before they begin. Bounds from the model's dimensions. Twin of
// runtime/device/scratch.py; knows sizes, no library.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bundle/bundle.hpp"
#include "headroom.hpp"

namespace mars {

/// Throws MemoryError where a limit leaves less memory than opening a graph on the CPU takes. `weights` are bytes, `threads` nothing for one a
/// core. `has_begun`: ONNX Runtime has an environment already. Under a limit memory goes back when it is freed, from here on.
void require_session(const Headroom& headroom, const ModelInfo& model, std::int64_t weights, const std::string& precision,
                     std::optional<int> threads, bool has_begun);

/// The memory of a session's steps, in any number of threads.
///
/// ONNX Runtime's arena takes as much again as it has when it grows: where a limit stands already a session is opened without one, and where it
/// comes later, that is reckoned with. With an arena what a step took is kept: one that is nowhere larger than one which ran finds it there, but
/// for what the arena likes to take besides.
class Scratch {
  public:
    using Size = std::array<std::int64_t, 3>;                           // positions, scores, outputs
    static constexpr std::int64_t first_growth = std::int64_t{8} << 20; // of an arena, whatever is asked of it

    /// A step that was let through. Nobody else is given its bytes until it ends.
    class Step {
      public:
        Step() = default;

        /// It got what it needed, and its session keeps that.
        void ran();

      private:
        friend class Scratch;
        Scratch* scratch_ = nullptr; // nothing where it tells nothing
        Size size_{};
        std::int64_t before_ = 0; // address space
        std::optional<Headroom::Grant> grant_;
    };

    Scratch(const ModelInfo& model, std::int64_t inner, bool arena, Headroom headroom = Headroom());

    /// Of a variant with so many bytes of weights, which bound the width of its inner layers.
    Scratch(const ModelInfo& model, const Variant& variant, std::int64_t weights, bool arena, Headroom headroom = Headroom());

    /// Throws MemoryError where a limit leaves too little for a step of `rows` x `slots`.
    Step step(std::int64_t rows, std::int64_t slots, std::int64_t capacity, std::int64_t outputs);

    /// What a step of a size takes, at most.
    std::int64_t num_bytes(const Size& size) const;

  private:
    void keep(const Size& size, std::int64_t before);
    bool has_run(const Size& size) const;

    const Headroom headroom_;
    const bool arena_;
    double position_ = 0.0, score_ = 0.0, choice_ = 0.0; // bytes of each
    std::mutex lock_;                                    // guards what is below
    std::vector<Size> ran_;
    std::int64_t grown_ = 0; // address space that steps took
};

} // namespace mars
