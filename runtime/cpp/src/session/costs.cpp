#include "session/costs.hpp"

#include <nlohmann/json.hpp>

#include <mars/errors.hpp>

#include "bundle/fields.hpp"
#include "bundle/files.hpp"
#include "bundle/profiles.hpp"
#include "bundle/sha256.hpp"
#include "device/ort/backend.hpp"
#include "device/ort/kernels.hpp"
#include "machine.hpp"

namespace mars {

namespace fs = std::filesystem;

namespace {

constexpr int version = 3;
constexpr std::size_t most_bytes = 16384;

std::optional<Cost> read(const fs::path& file) {
    const std::optional<std::string> text = read_file(file, most_bytes + 1);
    if (!text || text->size() > most_bytes) return std::nullopt;
    try {
        return Cost(parse_json(*text).at("points").get<std::vector<std::pair<std::int64_t, double>>>());
    } catch (const std::exception&) { // damaged or hostile: measure again
        return std::nullopt;
    }
}

/// If the file cannot be written, the next session measures again.
void write(const fs::path& file, const Cost& cost) {
    std::error_code error;
    fs::create_directories(file.parent_path(), error);
    if (!error) write_whole(file, nlohmann::json{{"points", cost.points()}}.dump() + "\n");
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
    if (variant.precision == "w8a8")
        if (const std::optional<Kernels> kernels = installed_kernels()) known.push_back(kernels->instructions);
    const std::string name = sha256(known.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace));
    return *cache / "costs-cpp" / (name.substr(0, 32) + ".json");
}

std::shared_ptr<const Cost> Costs::get(Backend& backend, std::int64_t block, std::int64_t mask_id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (cost_) return cost_;
    if (file_)
        if (auto kept = read(*file_)) return cost_ = std::make_shared<const Cost>(std::move(*kept));
    cost_ = std::make_shared<const Cost>(measure(backend, block, mask_id));
    if (file_ && !is_busy()) write(*file_, *cost_);
    return cost_;
}

void Costs::set(Cost cost) {
    const std::lock_guard<std::mutex> lock(mutex_);
    cost_ = std::make_shared<const Cost>(std::move(cost));
}

} // namespace mars
