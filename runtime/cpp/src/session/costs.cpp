#include "session/costs.hpp"

#include <tuple>

#include <nlohmann/json.hpp>

#include "bundle/fields.hpp"
#include "bundle/files.hpp"
#include "bundle/profiles.hpp"
#include "bundle/sha256.hpp"
#include "device/ort/backend.hpp"
#include "machine.hpp"

namespace mars {

namespace fs = std::filesystem;

namespace {

constexpr int version = 4;
constexpr std::size_t max_file_bytes = 16384;

LearnedCost read(const Cost& curve, const std::optional<fs::path>& file) {
    const std::optional<std::string> text = file ? read_file(*file, max_file_bytes + 1) : std::nullopt;
    if (!text || text->size() > max_file_bytes) return LearnedCost(curve);
    try {
        std::vector<Learned> learned;
        for (const auto& [positions, ratio, weight] :
             parse_json(*text).at("sizes").get<std::vector<std::tuple<std::int64_t, double, double>>>())
            learned.push_back({positions, ratio, weight});
        return LearnedCost(curve, learned);
    } catch (const std::exception&) { // damaged or hostile: learn again
        return LearnedCost(curve);
    }
}

/// If the file cannot be written, the next session learns again.
void write(const fs::path& file, const std::vector<Learned>& learned) {
    std::error_code error;
    fs::create_directories(file.parent_path(), error);
    nlohmann::json sizes = nlohmann::json::array();
    for (const Learned& size : learned) sizes.push_back({size.positions, size.ratio, size.weight});
    if (!error) write_whole(file, nlohmann::json{{"sizes", sizes}}.dump() + "\n");
}

} // namespace

std::optional<fs::path> cost_file(const Bundle& bundle, const Variant& variant, const std::string& device, std::optional<int> threads,
                                  const std::map<std::string, std::string>& options) {
    const std::optional<fs::path> cache = cache_dir();
    if (!cache) return std::nullopt;
    const Manifest& manifest = bundle.manifest;
    nlohmann::json known{version,
                         sha256_of(manifest, variant.file).value_or(""),
                         sha256_of(manifest, variant.weights).value_or(""),
                         variant.precision,
                         variant.accuracy_level.value_or(-1),
                         manifest.block,
                         variant.backend,
                         variant.engine ? variant.engine->version : OrtBackend::version(),
                         device,
                         threads.value_or(0),
                         num_cores(),
                         this_platform(),
                         processor()};
    if (!options.empty()) known.push_back(options);
    if (variant.precision == "w8a8") known.push_back(kernel_instructions());
    const std::string name = sha256(known.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace));
    return *cache / "costs-cpp" / (name.substr(0, 32) + ".json");
}

Costs::Costs(Cost curve, std::optional<fs::path> file) : file_(std::move(file)), learned_(read(curve, file_)) {}

std::shared_ptr<const Cost> Costs::get() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return fixed_ ? fixed_ : learned_.cost();
}

void Costs::record(std::int64_t seqs, std::int64_t slots, double seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (learned_.record(seqs, slots, seconds) && file_) write(*file_, learned_.learned());
}

void Costs::set(Cost cost) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fixed_ = std::make_shared<const Cost>(std::move(cost));
}

} // namespace mars
