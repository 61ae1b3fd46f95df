// Any bytes as a manifest: a manifest or a BundleError, nothing else.
#include <cstddef>
#include <cstdint>

#include <mars/errors.hpp>

#include "bundle/bundle.hpp"
#include "deep.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    try {
        mars::parse_manifest(deepened(data, size));
    } catch (const mars::BundleError&) {
    }
    return 0;
}
