// Memory that runs out once, for tests of the state after a failed allocation.
#pragma once

/// While this lives, the allocation of this thread after `left` others throws std::bad_alloc; later ones succeed.
class ShortMemory {
  public:
    explicit ShortMemory(long left);
    ~ShortMemory();
    ShortMemory(const ShortMemory&) = delete;
    ShortMemory& operator=(const ShortMemory&) = delete;

    /// Whether one has failed.
    bool has_failed() const;
};
