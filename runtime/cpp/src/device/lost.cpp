#include "device/lost.hpp"

#include <algorithm>
#include <cctype>
#include <utility>

namespace mars {

namespace {

constexpr std::pair<const char*, const char*> lasting[] = {
    {"cudaErrorECCUncorrectable", "214"},    {"cudaErrorNvlinkUncorrectable", "220"}, {"cudaErrorContained", "226"},
    {"cudaErrorIllegalAddress", "700"},      {"cudaErrorLaunchTimeout", "702"},       {"cudaErrorAssert", "710"},
    {"cudaErrorHardwareStackError", "714"},  {"cudaErrorIllegalInstruction", "715"},  {"cudaErrorMisalignedAddress", "716"},
    {"cudaErrorInvalidAddressSpace", "717"}, {"cudaErrorInvalidPc", "718"},           {"cudaErrorLaunchFailure", "719"},
    {"cudaErrorTensorMemoryLeak", "721"},    {"cudaErrorExternalDevice", "911"}};

/// Whether `words` contains "CUDA failure 700" or "CUDA error 700" without a further digit, as ONNX Runtime writes it.
bool has_number(const std::string& words, const std::string& number) {
    for (const char* what : {"CUDA failure ", "CUDA error "}) {
        const std::string whole = what + number;
        for (std::size_t at = words.find(whole); at != std::string::npos; at = words.find(whole, at + 1)) {
            const std::size_t end = at + whole.size();
            if (end == words.size() || std::isdigit(static_cast<unsigned char>(words[end])) == 0) return true;
        }
    }
    return false;
}

} // namespace

bool is_lasting(const std::string& words) {
    return std::any_of(std::begin(lasting), std::end(lasting),
                       [&](const auto& each) { return words.find(each.first) != std::string::npos || has_number(words, each.second); });
}

} // namespace mars
