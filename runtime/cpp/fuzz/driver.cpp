// Runs fuzzing programs without libFuzzer; with it, `PROGRAM --seeds=DIRECTORY` writes their seeds.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "fuzz.hpp"

namespace {

constexpr std::string_view seeds_option = "--seeds=";

void write(const std::filesystem::path& directory) {
    std::filesystem::create_directories(directory);
    int number = 0;
    for (const std::string& seed : seeds()) std::ofstream(directory / ("seed-" + std::to_string(number++)), std::ios::binary) << seed;
}

/// Whether the seeds were requested and have been written.
bool has_written(int argc, char** argv) {
    const std::string_view first = argc == 2 ? argv[1] : "";
    if (first.substr(0, seeds_option.size()) != seeds_option) return false;
    write(first.substr(seeds_option.size()));
    return true;
}

} // namespace

#ifdef MARS_LIBFUZZER

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
    if (has_written(*argc, *argv)) std::exit(0);
    return 0;
}

#else

namespace {

constexpr std::size_t longest = 65536;

/// Seeds with one to eight changes; the same ones in every run.
class Mutant {
  public:
    std::string next(const std::vector<std::string>& from) {
        std::string data = from[draw(from.size())];
        for (std::size_t changes = 1 + draw(8); changes > 0; --changes) change(data, from);
        data.resize(std::min(data.size(), longest));
        return data;
    }

  private:
    std::size_t draw(std::size_t below) { return static_cast<std::size_t>(random_() % below); }

    void change(std::string& data, const std::vector<std::string>& from) {
        const std::size_t at = draw(data.size() + 1), size = std::min(1 + draw(draw(2) == 0 ? 8 : 200), data.size() - at);
        switch (draw(6)) {
        case 0:
            data.insert(at, 1 + draw(3), static_cast<char>(draw(256)));
            break;
        case 1:
            data.erase(at, size);
            break;
        case 2:
            data.insert(at, data.substr(draw(data.size() + 1), 1 + draw(400)));
            break;
        case 3: {
            const std::string& other = from[draw(from.size())];
            data.replace(at, size, other, draw(other.size() + 1), 1 + draw(400));
            break;
        }
        default:
            if (at < data.size()) data[at] = static_cast<char>(draw(2) == 0 ? data[at] ^ (1 << draw(8)) : draw(256));
        }
    }

    std::mt19937_64 random_{20261122};
};

void run(const std::string& data) { LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(data.data()), data.size()); }

} // namespace

/// `PROGRAM [NUMBER] [FILE...]`: runs the files, or the seeds and that many changed ones.
int main(int argc, char** argv) {
    if (has_written(argc, argv)) return 0;
    const int number = argc > 1 ? std::atoi(argv[1]) : 2000;
    for (int i = 2; i < argc; ++i) {
        std::ifstream file(argv[i], std::ios::binary);
        run({std::istreambuf_iterator<char>(file), {}});
    }
    if (argc > 2) return 0;
    const std::vector<std::string> from = seeds();
    for (const std::string& seed : from) run(seed);
    const std::string last = std::filesystem::path(argv[0]).filename().string() + ".last"; // the input at which it ends
    std::ofstream kept(last, std::ios::binary); // open all the time: a file system may wait for its disk where one is closed
    Mutant mutant;
    for (int i = 0; i < number; ++i) {
        const std::string data = mutant.next(from);
        kept.seekp(0) << data << std::flush;
        std::filesystem::resize_file(last, data.size());
        run(data);
    }
    kept.close();
    std::filesystem::remove(last);
    std::printf("%zu seeds and %d of their kind: nothing found\n", from.size(), number);
    return 0;
}

#endif
