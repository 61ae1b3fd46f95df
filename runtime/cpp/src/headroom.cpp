// Limits, what is taken of them, and what running work was granted.
#include "headroom.hpp"

#include <algorithm>
#include <fstream>
#include <mutex>
#include <sys/resource.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <mars/errors.hpp>

namespace mars {

namespace {

constexpr std::int64_t usual_stack = std::int64_t{8} << 20, largest_stack = std::int64_t{1} << 30; // of a thread where no limit says
constexpr std::int64_t most_bytes = std::int64_t{1} << 60; // bytes of any sum: four of them are a number still
constexpr const char* of_group = "the memory limit of this process's control group or container";

/// Limits of the process: the figure of `statm` that counts, and what a user calls them.
struct Own {
    int resource;
    std::size_t column;
    const char* words;
};
constexpr Own own_limits[] = {{RLIMIT_AS, 0, "the limit on this process's address space (ulimit -v)"},
                              {RLIMIT_DATA, 5, "the limit on this process's data (ulimit -d)"}};

std::mutex granting; // guards what is below: the process's, since limits are
std::int64_t granted = 0;

std::int64_t clamped(std::int64_t bytes) { return std::clamp(bytes, std::int64_t{0}, most_bytes); }

[[noreturn]] void refuse(const Need& need, std::int64_t needed, std::int64_t left, const char* limit, std::int64_t running) {
    const std::int64_t wanted = needed / 1'000'000 + (needed % 1'000'000 != 0 ? 1 : 0);
    throw MemoryError("not enough memory: " + need.what + " needs about " + std::to_string(wanted) + " MB, and " + limit + " leaves " +
                      std::to_string(std::max<std::int64_t>(0, left) / 1'000'000) + " MB" +
                      (running > 0 ? " beside what runs already" : "") + "; raise it, or " + need.advice);
}

} // namespace

std::optional<std::int64_t> process_limit(int resource) {
    rlimit found{};
    if (getrlimit(static_cast<decltype(RLIMIT_AS)>(resource), &found) != 0 || found.rlim_cur == RLIM_INFINITY) return std::nullopt;
    return static_cast<std::int64_t>(std::min<rlim_t>(found.rlim_cur, static_cast<rlim_t>(most_bytes)));
}

Headroom::Grant::~Grant() {
    if (num_bytes_ == 0) return;
    const std::lock_guard<std::mutex> lock(granting);
    granted -= num_bytes_;
}

bool Headroom::is_limited() const { return readings_.limit(RLIMIT_AS) || readings_.limit(RLIMIT_DATA); }

void Headroom::require(const Need& need) const {
    const std::lock_guard<std::mutex> lock(granting);
    weigh(need, granted);
}

Headroom::Grant Headroom::grant(const Need& need) const {
    const std::lock_guard<std::mutex> lock(granting);
    weigh(need, granted);
    const std::int64_t num_bytes = std::min(clamped(need.num_bytes), most_bytes - granted);
    granted += num_bytes;
    return Grant(num_bytes);
}

void Headroom::weigh(const Need& need, std::int64_t running) const {
    const std::int64_t needed = clamped(need.num_bytes) + reserve;
    std::vector<std::int64_t> taken;
    for (const Own& each : own_limits) {
        const auto limit = readings_.limit(each.resource);
        if (!limit) continue;
        if (taken.empty()) taken = pages();
        if (taken.size() <= each.column) continue;
        const std::int64_t left = *limit - taken[each.column] * sysconf(_SC_PAGESIZE) - running;
        const std::int64_t here = needed + clamped(need.stacks) + (each.resource == RLIMIT_AS ? clamped(need.code) : 0);
        if (left < here) refuse(need, here, left, each.words, running);
    }
    if (need.num_bytes < large) return;
    if (const auto left = group_left(readings_.files); left && *left - running < needed)
        refuse(need, needed, *left - running, of_group, running);
}

void Headroom::return_freed() {
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, 128 << 10); // what it begins with
#endif
}

std::int64_t Headroom::stacks(std::int64_t threads) const {
    const std::int64_t soft = readings_.limit(RLIMIT_STACK).value_or(0);
    return std::clamp<std::int64_t>(threads, 0, most_bytes / largest_stack) * (soft > 0 && soft <= largest_stack ? soft : usual_stack);
}

std::int64_t Headroom::address_space() const {
    const auto taken = pages();
    return taken.empty() ? 0 : taken.front() * sysconf(_SC_PAGESIZE);
}

std::vector<std::int64_t> Headroom::pages() const {
    std::ifstream file(readings_.pages);
    std::vector<std::int64_t> counts;
    for (std::int64_t count = 0; file >> count;) counts.push_back(count);
    return counts;
}

} // namespace mars
