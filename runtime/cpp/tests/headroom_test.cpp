// What limits leave is asked before what would end it: refused in clear words, without a limit never. The cases of
// tests/runtime/headroom/.
#include <atomic>
#include <chrono>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <map>
#include <string>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <doctest/doctest.h>

#include <mars/errors.hpp>

#include "device/scratch.hpp"
#include "headroom.hpp"

namespace {

namespace fs = std::filesystem;

constexpr std::int64_t mb = std::int64_t{1} << 20;
constexpr std::int64_t gb = std::int64_t{1} << 30;

const mars::ModelInfo model{"llama", 32'000, 2048, 24, 16, 8, 128, 8192};

void write(const fs::path& file, const std::string& text) {
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
}

/// A process of 1,000 pages, 200 of them data, with the limits that a test sets, and no control group.
struct Process {
    Process() {
        char name[] = "/tmp/mars-headroom-XXXXXX";
        place = mkdtemp(name);
        write(place / "statm", "1000 500 100 1 0 200 0\n");
    }
    ~Process() { fs::remove_all(place); }
    Process(const Process&) = delete;
    Process& operator=(const Process&) = delete;

    mars::Readings readings() {
        const auto limit = [this](int kind) {
            const auto at = limits.find(kind);
            return at == limits.end() ? std::optional<std::int64_t>() : at->second;
        };
        return {limit, place / "statm", files()};
    }
    mars::MemoryFiles files() const { return {place / "cgroup", place / "own", place / "meminfo"}; }
    mars::Headroom headroom() { return mars::Headroom(readings()); }

    void leave(std::int64_t bytes, int kind = RLIMIT_AS, std::int64_t pages = 1000) {
        limits[kind] = pages * sysconf(_SC_PAGESIZE) + bytes;
    }

    void group(const fs::path& at, const std::string& most, int used, int cached, const std::string& swap = "max") const {
        write(at / "memory.max", most + "\n");
        write(at / "memory.current", std::to_string(used) + "\n");
        write(at / "memory.swap.max", swap + "\n");
        write(at / "memory.stat", "anon 5\nactive_anon 7\ninactive_file " + std::to_string(cached - 1) + "\nactive_file 1\n");
    }

    fs::path place;
    std::map<int, std::int64_t> limits{{RLIMIT_STACK, 8 * mb}};
};

std::string refusal(const mars::Headroom& headroom, const mars::Need& need) {
    try {
        headroom.require(need);
        return "";
    } catch (const mars::MemoryError& error) {
        return error.what();
    }
}

std::string refusal(mars::Scratch& scratch, std::int64_t rows, std::int64_t slots, std::int64_t capacity, std::int64_t outputs) {
    try {
        scratch.step(rows, slots, capacity, outputs).ran();
        return "";
    } catch (const mars::MemoryError& error) {
        return error.what();
    }
}

constexpr mars::Scratch::Size size{2 * 64, 2 * 64 * 1024, 2 * 8}; // of a step of 2 x 64 slots at 1024 entries, 8 outputs each

} // namespace

TEST_CASE("without a limit nothing is refused and nothing read") {
    Process process;
    fs::remove(process.place / "statm");
    const mars::Headroom headroom = process.headroom();
    CHECK(!headroom.is_limited());
    CHECK(refusal(headroom, {1 << 30, "all", "less", std::int64_t{1} << 50, std::int64_t{1} << 50}).empty());
    mars::require_session(headroom, model, std::int64_t{1} << 50, "float32", 1000, false);
    mars::Scratch scratch(model, 8192, true, headroom);
    CHECK(refusal(scratch, 1000, 1'000'000, 1'000'000, 1000).empty());
}

TEST_CASE("a limit says how much is missing of what and what to do") {
    Process process;
    process.leave(30 * mb);
    const mars::Headroom headroom = process.headroom();
    CHECK(headroom.is_limited());
    CHECK(headroom.address_space() == 1000 * sysconf(_SC_PAGESIZE));
    CHECK(refusal(headroom, {26 * mb, "this", "that"}).empty());
    CHECK(
        refusal(headroom, {26 * mb + 1, "the thing", "do without"}) ==
        "not enough memory: the thing needs about 32 MB, and the limit on this process's address space (ulimit -v) leaves 31 MB; raise it, "
        "or do without");
    CHECK(refusal(headroom, {6 * mb, "this", "that", 10 * mb, 10 * mb}).empty());
    CHECK(refusal(headroom, {6 * mb, "this", "that", 11 * mb, 10 * mb}).find("ulimit -v") != std::string::npos);
    CHECK(refusal(headroom, {6 * mb, "this", "that", 10 * mb, 11 * mb}).find("ulimit -v") != std::string::npos);
    CHECK(headroom.stacks(3) == 24 * mb);
    process.limits[RLIMIT_STACK] = 2 * gb;
    CHECK(headroom.stacks(3) == 24 * mb);
    CHECK(headroom.stacks(-1) == 0);
}

TEST_CASE("code is no data and stacks are") {
    Process process;
    process.leave(30 * mb, RLIMIT_DATA, 200);
    const mars::Headroom headroom = process.headroom();
    CHECK(refusal(headroom, {20 * mb, "this", "that", 0, std::int64_t{1} << 50}).empty());
    CHECK(refusal(headroom, {20 * mb, "this", "that", 7 * mb}).find("data (ulimit -d) leaves 31 MB") != std::string::npos);
}

TEST_CASE("a limit below what is held leaves nothing, and no sum is too large") {
    Process process;
    process.leave(1, RLIMIT_AS, 0);
    CHECK(refusal(process.headroom(), {0, "this", "that"}).find("leaves 0 MB") != std::string::npos);
    const std::int64_t all = std::numeric_limits<std::int64_t>::max();
    CHECK(refusal(process.headroom(), {all, "this", "that", all, all}).find("this needs about") != std::string::npos);
    mars::ModelInfo vast = model;
    vast.hidden_size = vast.vocab_size = vast.num_heads = all;
    CHECK_THROWS_AS(mars::require_session(process.headroom(), vast, all, "int4", std::numeric_limits<int>::max(), false),
                    mars::MemoryError);
    mars::Scratch scratch(vast, all, true, process.headroom());
    CHECK(refusal(scratch, 1 << 20, 1 << 20, all / 2, 1 << 20).find("slots needs about") != std::string::npos);
}

TEST_CASE("a control group is asked for what is large") {
    Process process;
    write(process.place / "own", "0::/\n");
    process.group(process.place / "cgroup", std::to_string(10 * mb), 0, 1);
    const mars::Headroom headroom = process.headroom();
    CHECK(refusal(headroom, {mars::Headroom::large - 1, "this", "that", std::int64_t{1} << 40}).empty());
    CHECK(refusal(headroom, {mars::Headroom::large, "this", "that"}).find("control group or container leaves 10 MB") != std::string::npos);
    process.group(process.place / "cgroup", std::to_string(21 * mb), 0, 1);
    CHECK(refusal(headroom, {mars::Headroom::large, "this", "that", std::int64_t{1} << 40}).empty());
}

TEST_CASE("opening counts weights, the vocabulary, threads and the library") {
    Process process;
    const auto least = [&](int threads, std::int64_t weights, bool has_begun) {
        std::int64_t low = 0, high = std::int64_t{1} << 36;
        while (low < high) {
            const std::int64_t middle = (low + high) / 2;
            process.leave(middle);
            try {
                mars::require_session(process.headroom(), model, weights, "float32", threads, has_begun);
                high = middle;
            } catch (const mars::MemoryError&) {
                low = middle + 1;
            }
        }
        return low;
    };
    const std::int64_t plain = least(1, 0, true);
    CHECK(plain > 4 * 32'000 * 2048);
    CHECK(least(5, 0, true) - plain == 4 * 8 * mb);
    CHECK(least(1, 0, false) - plain == 10 * mb);
    CHECK(least(1, 1'000'000'000, true) - plain > 1'050'000'000);
    CHECK(least(1, 1'000'000'000, true) - plain < 1'200'000'000);
}

TEST_CASE("steps no larger than one that ran need what an arena likes to take") {
    Process process;
    mars::Scratch scratch(model, 8192, true, process.headroom());
    CHECK(refusal(scratch, 2, 64, 1024, 8).empty());
    process.leave(mars::Headroom::reserve + mars::Scratch::first_growth);
    using Step = std::initializer_list<std::int64_t>;
    for (const Step& step : {Step{2, 64, 1024, 8}, {1, 128, 1024, 8}, {1, 1, 128, 1}, {16, 8, 512, 1}}) {
        const std::int64_t* of = step.begin();
        CHECK(refusal(scratch, of[0], of[1], of[2], of[3]).empty());
    }
    for (const Step& step : {Step{2, 64, 1025, 8}, {1, 129, 1, 1}, {1, 1, 128, 17}, {3, 64, 128, 1}}) {
        const std::int64_t* of = step.begin();
        const std::string words = "a step of " + std::to_string(of[0]) + " x " + std::to_string(of[1]) + " slots needs about";
        CHECK(refusal(scratch, of[0], of[1], of[2], of[3]).find(words) != std::string::npos);
    }
    process.leave(mars::Headroom::reserve + mars::Scratch::first_growth - 1);
    CHECK(refusal(scratch, 1, 1, 128, 1).find("a step of 1 x 1 slots") != std::string::npos);
}

TEST_CASE("a step that failed is not known") {
    Process process;
    mars::Scratch scratch(model, 8192, true, process.headroom());
    static_cast<void>(scratch.step(2, 64, 1024, 8)); // without ran()
    process.leave(mars::Headroom::reserve + mars::Scratch::first_growth);
    CHECK(!refusal(scratch, 2, 64, 1024, 8).empty());
}

TEST_CASE("without an arena every step needs its own") {
    Process process;
    mars::Scratch scratch(model, 8192, false, process.headroom());
    const std::int64_t needed = scratch.num_bytes(size);
    // Of runtime/device/scratch.py, for the same model.
    CHECK(needed == 128 * 4 * (8 * 2048 + 4 * 8192) + 131'072 * 3 * 4 * 16 + 16 * 16 * 32'000);
    for (const std::int64_t spare : {needed, needed - 1, needed}) {
        process.leave(mars::Headroom::reserve + spare);
        CHECK(refusal(scratch, 2, 64, 1024, 8).empty() == (spare == needed));
    }
}

TEST_CASE("what runs is not given to another") {
    Process process;
    mars::Scratch one(model, 8192, false, process.headroom()), other(model, 8192, false, process.headroom());
    const std::int64_t needed = one.num_bytes(size);
    process.leave(mars::Headroom::reserve + 2 * needed - 1);
    const std::string beside =
        "leaves " + std::to_string((mars::Headroom::reserve + needed - 1) / 1'000'000) + " MB beside what runs already";
    for (int i = 0; i < 3; ++i) {
        {
            const mars::Scratch::Step running = one.step(2, 64, 1024, 8);
            CHECK(refusal(other, 2, 64, 1024, 8).find(beside) != std::string::npos);
            CHECK(refusal(process.headroom(), {needed, "this", "that"}).find(beside) != std::string::npos);
            CHECK(refusal(other, 1, 64, 1024, 8).empty());
        }
        CHECK(refusal(other, 2, 64, 1024, 8).empty());
    }
    process.leave(mars::Headroom::reserve + 2 * needed);
    const mars::Scratch::Step running = one.step(2, 64, 1024, 8);
    CHECK(refusal(other, 2, 64, 1024, 8).empty());
}

TEST_CASE("steps in threads are let through as far as there is room") {
    Process process;
    mars::Scratch scratch(model, 8192, false, process.headroom());
    const std::int64_t needed = scratch.num_bytes(size);
    process.leave(mars::Headroom::reserve + 3 * needed);
    std::atomic<int> at_once{0}, most{0}, refused{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; ++i)
        threads.emplace_back([&] {
            for (int k = 0; k < 50; ++k) try {
                    mars::Scratch::Step step = scratch.step(2, 64, 1024, 8);
                    const int now = ++at_once;
                    for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
                    }
                    std::this_thread::sleep_for(std::chrono::milliseconds(2));
                    --at_once;
                    step.ran();
                } catch (const mars::MemoryError&) {
                    ++refused;
                }
        });
    for (std::thread& thread : threads) thread.join();
    CHECK(most == 3);
    CHECK(refused > 0);
    CHECK(refusal(scratch, 6, 64, 1024, 8).empty()); // nothing of them is left
}

TEST_CASE("the tightest group above counts, and files in memory are free") {
    Process process;
    const fs::path service = process.place / "cgroup" / "service";
    write(process.place / "meminfo", "MemTotal: 9000 kB\nMemAvailable: 4000 kB\nSwapFree: 0 kB\n");
    write(process.place / "own", "0::/service/one\n");
    CHECK(mars::group_left(process.files()) == std::nullopt);
    CHECK(mars::available_memory(process.files()) == 4000 * 1024);
    process.group(service / "one", "max", 10, 4);
    CHECK(mars::group_left(process.files()) == std::nullopt);
    process.group(service, "1000", 900, 300);
    CHECK(mars::group_left(process.files()) == 1000 - 900 + 300);
    process.group(service / "one", "500", 450, 10);
    CHECK(mars::group_left(process.files()) == 60);
    CHECK(mars::available_memory(process.files()) == 60);
    write(process.place / "meminfo", "MemAvailable: 4000 kB\nSwapFree: 1 kB\n");
    CHECK(mars::group_left(process.files()) == 60 + 1024);
    process.group(service / "one", "500", 450, 10, "7");
    CHECK(mars::group_left(process.files()) == 67);
}

TEST_CASE("a container sees its group as the root, and may not know its name") {
    Process process;
    process.group(process.place / "cgroup", "1000", 400, 100);
    for (const char* own : {"0::/service/one\n", "0::/\n", "0::/../..\n"}) {
        write(process.place / "own", own);
        CHECK(mars::group_left(process.files()) == 700);
    }
}

TEST_CASE("groups of the first kind") {
    Process process;
    write(process.place / "own", "9:name=systemd:/x\n4:cpu,memory:/a/b\n0::/\n");
    const fs::path group = process.place / "cgroup" / "memory" / "a";
    write(group / "memory.limit_in_bytes", "9223372036854771712\n");
    write(group / "memory.usage_in_bytes", "600\n");
    write(group / "memory.stat", "inactive_file 1\nactive_file 2\ntotal_inactive_file 30\ntotal_active_file 20\n");
    CHECK(mars::group_left(process.files()) == std::nullopt);
    write(group / "memory.limit_in_bytes", "1000\n");
    CHECK(mars::group_left(process.files()) == 1000 - 600 + 50);
}
