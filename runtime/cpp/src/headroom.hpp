// The memory that limits of this process leave it, asked before what would end it rather than fail: ONNX Runtime ends a process that gets no
// memory in the wrong place, in a destructor or a thread of its own. So what takes much is weighed before it begins. Twin of
// runtime/headroom.py; knows limits and sums, nothing of models. Without a limit it says nothing, and costs two system calls.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "machine.hpp"

namespace mars {

/// Memory that is wanted.
struct Need {
    std::int64_t num_bytes = 0;
    std::string what;        // that takes it, as the beginning of a sentence
    std::string advice;      // how to need less
    std::int64_t stacks = 0; // bytes that are taken and hardly touched, which a control group does not count
    std::int64_t code = 0;   // bytes that are no data
};

/// The soft limit of one of this process's resources, such as RLIMIT_AS; nothing without one.
std::optional<std::int64_t> process_limit(int resource);

/// Where this process reads what it may take and what it has.
struct Readings {
    std::function<std::optional<std::int64_t>(int resource)> limit = process_limit;
    std::filesystem::path pages = "/proc/self/statm";
    MemoryFiles files;
};

class Headroom {
  public:
    /// Bytes that stay free: an error's words, first blocks of a thread, small things of a step.
    static constexpr std::int64_t reserve = std::int64_t{4} << 20;
    /// A control group is asked about no less: reading it takes as long as a small step.
    static constexpr std::int64_t large = std::int64_t{16} << 20;

    /// Bytes of work that runs: nobody else is given them before this ends.
    class Grant {
      public:
        Grant() = default;
        explicit Grant(std::int64_t num_bytes) : num_bytes_(num_bytes) {}
        Grant(Grant&& other) noexcept : num_bytes_(std::exchange(other.num_bytes_, 0)) {}
        Grant& operator=(Grant&&) = delete;
        ~Grant();

      private:
        std::int64_t num_bytes_ = 0;
    };

    explicit Headroom(Readings readings = {}) : readings_(std::move(readings)) {}

    /// Whether this process has a limit of its own: what every step asks.
    bool is_limited() const;

    /// Throws MemoryError where a limit leaves less than is needed and what must stay free besides.
    void require(const Need& need) const;

    /// `require`; and as long as the grant lasts its bytes count as taken, whether or not the work has taken them yet. So two steps at once
    /// are weighed together, and by more than they take rather than by less.
    [[nodiscard]] Grant grant(const Need& need) const;

    /// Let memory that is freed go back at once, so that what limits leave is what there is: glibc keeps larger and larger blocks to itself
    /// otherwise, and what comes to lie between them makes them useless. A step of 30 layers took four times what it uses.
    static void return_freed();

    /// Address space of so many threads' stacks.
    std::int64_t stacks(std::int64_t threads) const;

    /// Bytes of address space that this process has; 0 where unknown.
    std::int64_t address_space() const;

  private:
    std::vector<std::int64_t> pages() const;
    void weigh(const Need& need, std::int64_t running) const;

    Readings readings_;
};

} // namespace mars
