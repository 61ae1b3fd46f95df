#include "bundle/profiles.hpp"

#include <set>
#include <vector>

#include <mars/errors.hpp>

#include "joined.hpp"

namespace mars {

std::optional<std::string> sha256_of(const Manifest& manifest, const std::optional<std::string>& file) {
    for (const FileEntry& entry : manifest.files)
        if (file && entry.path == *file) return entry.sha256;
    return std::nullopt;
}

namespace {

std::string shown(const std::optional<std::int64_t>& level) { return level ? std::to_string(*level) : "None"; }

/// Why a profile is not valid for `variant`; empty for a valid one.
std::vector<std::string> staleness(const Manifest& manifest, const Variant& variant, const Profile& profile) {
    if (profile.variant != variant.name)
        return {"it was calibrated on variant " + profile.variant + ", but " + variant.name + " is running"};
    std::vector<std::string> reasons;
    if (profile.variant_sha256 != sha256_of(manifest, variant.file))
        reasons.push_back("the graph " + variant.file + " is not the one it was calibrated on");
    if (profile.weights_sha256 && profile.weights_sha256 != sha256_of(manifest, variant.weights))
        reasons.push_back("the weights are not those it was calibrated on");
    if (profile.precision && *profile.precision != variant.precision)
        reasons.push_back("it was calibrated in " + *profile.precision + ", but " + variant.precision + " is running");
    if (profile.accuracy_level != variant.accuracy_level)
        reasons.push_back("it was calibrated at accuracy level " + shown(profile.accuracy_level) + ", but " +
                          shown(variant.accuracy_level) + " is running");
    return reasons;
}

} // namespace

const Profile& find_profile(const Bundle& bundle, const Variant& variant, const std::string& name) {
    std::set<std::string> known;
    const Profile* match = nullptr;
    for (const Profile& each : bundle.manifest.profiles) {
        known.insert(each.name);
        if (each.name == name && (match == nullptr || (each.variant == variant.name && match->variant != variant.name))) match = &each;
    }
    if (match == nullptr)
        throw SessionError(bundle.path.string() + ": no profile `" + name.substr(0, 60) +
                           "` (there are: " + (known.empty() ? "none" : joined(known)) + "); `mars-export calibrate` makes one");
    if (const auto reasons = staleness(bundle.manifest, variant, *match); !reasons.empty())
        throw SessionError("profile `" + name + "` is stale: " + joined(reasons, "; ") + ". Renew it with `mars-export calibrate`");
    return *match;
}

} // namespace mars
