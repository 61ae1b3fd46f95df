#include "bundle/recipe.hpp"

#include <algorithm>

#include <mars/errors.hpp>

#include "bundle/fields.hpp"
#include "bundle/files.hpp"
#include "joined.hpp"

namespace mars {

namespace {

using Json = nlohmann::json;

constexpr std::string_view ending = ".build.json";
constexpr std::int64_t recipe_version = 1;

/// The names of a bundle's recipes.
std::vector<std::string> names_of(const Bundle& bundle) {
    std::vector<std::string> names;
    for (const FileEntry& file : bundle.manifest.files)
        if (file.path.size() > ending.size() && file.path.compare(file.path.size() - ending.size(), ending.size(), ending) == 0)
            names.push_back(file.path.substr(0, file.path.size() - ending.size()));
    return names;
}

Json read(const Bundle& bundle, const std::string& name) {
    const std::filesystem::path path = bundle.path / (name + std::string(ending));
    const std::optional<std::string> text = read_file(path);
    if (!text) throw BundleError(path.string() + ": not readable; copy or export the bundle again");
    return parse_json(*text, path.string(), true);
}

} // namespace

EngineRecipe EngineRecipe::find(const Bundle& bundle, const std::string& name, const std::string& backend) {
    const std::vector<std::string> all = names_of(bundle);
    std::vector<EngineRecipe> fitting;
    for (const std::string& each : all) {
        if (!name.empty() && each != name) continue;
        const Json value = read(bundle, each);
        const std::string where = each + std::string(ending);
        std::vector<std::string> problems;
        Fields fields(&value, where, problems);
        const std::int64_t version = fields.integer("version");
        EngineRecipe recipe;
        recipe.weights_ = fields.optional_text("weights").value_or("");
        Fields entry = fields.object("variant");
        recipe.name_ = entry.text("name");
        recipe.backend_ = entry.text("backend", {"tensorrt", "tensorrt_rtx"});
        recipe.capabilities_ = entry.object("engine").texts("compute_capabilities");
        if (problems.empty() && version != recipe_version)
            throw BundleError(where + ": a recipe of version " + std::to_string(version) + ", this mars-build-engine reads " +
                              std::to_string(recipe_version) + "; update it");
        if (problems.empty() && recipe.name_ != each) problems.push_back(where + ": is for an engine called `" + recipe.name_ + "`");
        if (!problems.empty()) fail(problems, "the recipe", "\n  make it again with `mars-export trt ... --no-build`");
        recipe.entry_ = value.at("variant");
        if (!name.empty() || recipe.backend_ == backend) fitting.push_back(std::move(recipe));
    }
    if (fitting.size() == 1) return fitting.front();
    const std::string what = !name.empty()     ? "no recipe `" + name + "`"
                             : fitting.empty() ? "no recipe for " + backend
                                               : "more than one recipe; give --recipe NAME";
    throw BundleError(bundle.path.string() + ": " + what + " (there: " + (all.empty() ? "none" : joined(all)) +
                      "); `mars-export trt BUNDLE --target ... --no-build` writes one");
}

std::int64_t EngineRecipe::weight_bytes(const Bundle& bundle) const {
    for (const FileEntry& file : bundle.manifest.files)
        if (file.path == weights_) return file.size;
    return 0;
}

std::string EngineRecipe::added_to(const std::string& manifest, const BuiltBy& built, const FileEntry& file,
                                   const std::string& where) const {
    Json whole = parse_json(manifest, where, true);
    Json entry = entry_;
    Json& engine = entry.at("engine");
    engine["version"] = built.version;
    engine.emplace("tf32", false); // unless the recipe says otherwise
    engine["cuda"] = built.cuda;
    engine["platform"] = built.platform;
    engine["compute_capabilities"] = built.compute_capabilities;
    engine["seconds"] = built.seconds;
    engine["peak_memory"] = built.peak_memory;
    entry["file"] = file.path;
    std::vector<Json> files, variants;
    for (const Json& each : whole.at("files"))
        if (each.at("path") != file.path) files.push_back(each);
    files.push_back({{"path", file.path}, {"size", file.size}, {"sha256", file.sha256}});
    std::sort(files.begin(), files.end(), [](const Json& a, const Json& b) { return a.at("path") < b.at("path"); });
    for (const Json& each : whole.at("variants"))
        if (each.at("name") != name_) variants.push_back(each);
    variants.push_back(entry);
    whole["files"] = files;
    whole["variants"] = variants;
    std::string text = whole.dump(2) + "\n";
    const Manifest checked = parse_manifest(text, where);
    const std::string graph = engine.value("graph", ""), sha256 = engine.value("graph_sha256", "");
    for (const FileEntry& each : checked.files)
        if (each.path == graph && each.sha256 != sha256)
            throw BundleError(where + ": " + graph + " is not the graph that the recipe " + name_ +
                              " was written for; make the recipe again with `mars-export trt ... --no-build`");
    return text;
}

} // namespace mars
