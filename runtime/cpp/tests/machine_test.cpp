// What Linux says of a machine: memory and cores that control groups leave, processors. The cases of
// tests/runtime/test_machine.py.
#include <fstream>
#include <string>
#include <unistd.h>

#include <doctest/doctest.h>

#include "machine.hpp"

namespace {

namespace fs = std::filesystem;

void write(const fs::path& file, const std::string& text) {
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
}

struct Machine {
    Machine() {
        char name[] = "/tmp/mars-machine-XXXXXX";
        place = mkdtemp(name);
    }
    ~Machine() { fs::remove_all(place); }
    Machine(const Machine&) = delete;
    Machine& operator=(const Machine&) = delete;

    mars::MachineFiles files() const { return {place / "cgroup", place / "own", place / "meminfo", place / "cpuinfo", place / "board"}; }

    void group(const fs::path& at, const std::string& most, int used, int cached, const std::string& swap = "max") const {
        write(at / "memory.max", most + "\n");
        write(at / "memory.current", std::to_string(used) + "\n");
        write(at / "memory.swap.max", swap + "\n");
        write(at / "memory.stat", "anon 5\nactive_anon 7\ninactive_file " + std::to_string(cached - 1) + "\nactive_file 1\n");
    }

    fs::path place;
};

} // namespace

TEST_CASE("the tightest control group limits memory, and its page cache counts as free") {
    Machine machine;
    const fs::path service = machine.place / "cgroup" / "service";
    write(machine.place / "meminfo", "MemTotal: 9000 kB\nMemAvailable: 4000 kB\nSwapFree: 0 kB\n");
    write(machine.place / "own", "0::/service/one\n");
    CHECK(mars::group_left(machine.files()) == std::nullopt);
    CHECK(mars::available_memory(machine.files()) == 4000 * 1024);
    machine.group(service / "one", "max", 10, 4);
    CHECK(mars::group_left(machine.files()) == std::nullopt);
    machine.group(service, "1000", 900, 300);
    CHECK(mars::group_left(machine.files()) == 1000 - 900 + 300);
    machine.group(service / "one", "500", 450, 10);
    CHECK(mars::group_left(machine.files()) == 60);
    CHECK(mars::available_memory(machine.files()) == 60);
    write(machine.place / "meminfo", "MemAvailable: 4000 kB\nSwapFree: 1 kB\n");
    CHECK(mars::group_left(machine.files()) == 60 + 1024);
    machine.group(service / "one", "500", 450, 10, "7");
    CHECK(mars::group_left(machine.files()) == 67);
}

TEST_CASE("a container may see its control group as the root, without its name") {
    Machine machine;
    machine.group(machine.place / "cgroup", "1000", 400, 100);
    for (const char* own : {"0::/service/one\n", "0::/\n", "0::/../..\n"}) {
        write(machine.place / "own", own);
        CHECK(mars::group_left(machine.files()) == 700);
    }
}

TEST_CASE("the affinity mask and the control group's CPU limit bound the number of cores") {
    Machine machine;
    const int all = mars::num_cores(machine.files());
    CHECK(all >= 1);
    write(machine.place / "own", "0::/service/one\n");
    write(machine.place / "cgroup" / "service" / "one" / "cpu.max", "max 100000\n");
    CHECK(mars::num_cores(machine.files()) == all);
    write(machine.place / "cgroup" / "service" / "cpu.max", "50000 100000\n");
    CHECK(mars::num_cores(machine.files()) == 1);
}

TEST_CASE("names of processors on x86 and Arm") {
    Machine machine;
    CHECK(mars::processor(machine.files()).empty());
    write(machine.place / "cpuinfo",
          "processor : 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0b\n\nCPU implementer\t: 0x41\nCPU part\t: 0xd05\n");
    CHECK(mars::processor(machine.files()) == "Arm 0x41/0xd05, Arm 0x41/0xd0b");
    write(machine.place / "board", std::string("A Board\0", 8));
    CHECK(mars::processor(machine.files()) == "A Board, Arm 0x41/0xd05, Arm 0x41/0xd0b");
    write(machine.place / "cpuinfo", "processor\t: 0\nmodel name\t: A Processor\n");
    CHECK(mars::processor(machine.files()) == "A Processor");
}
