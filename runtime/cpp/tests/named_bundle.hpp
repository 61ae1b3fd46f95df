// The bundle that a program of tests is run on, and token ids to ask it with.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <vector>

#include <doctest/doctest.h>

#include "bundle/bundle.hpp"

inline mars::Bundle bundle() {
    const char* path = std::getenv("MARS_BUNDLE");
    REQUIRE_MESSAGE(path != nullptr, "MARS_BUNDLE names no bundle");
    return mars::open_bundle(path);
}

/// Numbers without a pattern that a model could like.
inline std::vector<std::int64_t> some_ids(std::int64_t count, std::int64_t seed) {
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < count; ++i) ids.push_back((7 * i + 31 * seed) % 250);
    return ids;
}
