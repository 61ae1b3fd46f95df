// The conformance files, read for the tests that must reproduce them exactly.
#pragma once

#include <fstream>
#include <limits>
#include <optional>
#include <string>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "accept.hpp"

inline nlohmann::json conformance(const std::string& name) {
    std::ifstream file(std::string(CONFORMANCE) + "/" + name);
    REQUIRE_MESSAGE(file.good(), name);
    return nlohmann::json::parse(file);
}

/// A number, or one of the strings that stand for those JSON has none for.
inline double number_of(const nlohmann::json& value) {
    if (!value.is_string()) return value.get<double>();
    return value == "nan" ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
}

inline mars::Metric metric_of(const std::string& name) {
    if (name == "margin") return mars::Metric::margin;
    return name == "entropy" ? mars::Metric::entropy : mars::Metric::probability;
}

template <typename T>
std::optional<T> optional_of(const nlohmann::json& value) {
    return value.is_null() ? std::nullopt : std::optional<T>(value.get<T>());
}
