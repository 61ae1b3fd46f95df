// runtime/device/ort/products.py: exact byte products by ONNX Runtime, which w8a8 needs: some kernels add two products
// in 16 bits, with saturation.
#include <array>
#include <cstdio>
#include <optional>
#include <vector>

#include <mars/errors.hpp>

#include "device/ort/backend.hpp"
#include "machine.hpp"

namespace mars {

namespace {

constexpr std::int64_t inputs = 64, outputs = 48;
constexpr std::int8_t largest = 127;
constexpr int least_minor = 30;                                           // older versions abort with the entry below
const OrtOptions unsigned_weights = {{"session.x64quantprecision", "1"}}; // for weights of 8 bits; with VNNI it only costs time
// An ONNX model with one node, MatMulInteger of x [rows, 64] uint8 and w [64, 48] int8, up to the bytes of w.
constexpr std::array<unsigned char, 89> head{0x08, 0x08, 0x42, 0x04, 0x0A, 0x00, 0x10, 0x0D, 0x3A, 0xCE, 0x18, 0x0A, 0x18, 0x0A, 0x01,
                                             0x78, 0x0A, 0x01, 0x77, 0x12, 0x01, 0x79, 0x22, 0x0D, 0x4D, 0x61, 0x74, 0x4D, 0x75, 0x6C,
                                             0x49, 0x6E, 0x74, 0x65, 0x67, 0x65, 0x72, 0x12, 0x01, 0x70, 0x5A, 0x0F, 0x0A, 0x01, 0x78,
                                             0x12, 0x0A, 0x0A, 0x08, 0x08, 0x02, 0x12, 0x04, 0x0A, 0x00, 0x0A, 0x00, 0x62, 0x0F, 0x0A,
                                             0x01, 0x79, 0x12, 0x0A, 0x0A, 0x08, 0x08, 0x06, 0x12, 0x04, 0x0A, 0x00, 0x0A, 0x00, 0x2A,
                                             0x8C, 0x18, 0x08, 0x40, 0x08, 0x30, 0x10, 0x03, 0x42, 0x01, 0x77, 0x4A, 0x80, 0x18};

std::string graph() {
    std::string bytes(head.begin(), head.end());
    for (std::int64_t i = 0; i < inputs * outputs; ++i) bytes += static_cast<char>(i % 2 == 0 ? largest : -largest);
    return bytes;
}

/// The worst case: columns of one sign, and the largest activations.
bool is_exact(Ort::Session& session, std::int64_t rows) {
    std::vector<std::uint8_t> x(static_cast<std::size_t>(rows * inputs), 255);
    const std::array<std::int64_t, 2> shape{rows, inputs};
    const Ort::MemoryInfo host = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    const Ort::Value input = Ort::Value::CreateTensor<std::uint8_t>(host, x.data(), x.size(), shape.data(), shape.size());
    const char *name = "x", *result = "y";
    const std::vector<Ort::Value> values = session.Run(Ort::RunOptions(), &name, &input, 1, &result, 1);
    const std::int32_t* y = values[0].GetTensorData<std::int32_t>();
    for (std::int64_t i = 0; i < rows * outputs; ++i)
        if (y[i] != (i % 2 == 0 ? 1 : -1) * 255 * largest * inputs) return false;
    return true;
}

/// The first number of rows for which sessions with `entries` are inexact; kernels differ by it.
std::optional<std::int64_t> inexact(const Ort::Env& env, const OrtOptions& entries) {
    Ort::SessionOptions settings;
    settings.SetLogSeverityLevel(ORT_LOGGING_LEVEL_FATAL).SetIntraOpNumThreads(1);
    for (const auto& [name, value] : entries) settings.AddConfigEntry(name.c_str(), value.c_str());
    const std::string model = graph();
    Ort::Session session(env, model.data(), model.size(), settings);
    for (const std::int64_t rows : {1, 2, 8})
        if (!is_exact(session, rows)) return rows;
    return std::nullopt;
}

OrtOptions find(const Ort::Env& env, const OrtOptions& entries) {
    if (!inexact(env, entries)) return {};
    int major = 0, minor = 0;
    if (std::sscanf(OrtBackend::version().c_str(), "%d.%d", &major, &minor) == 2 && major == 1 && minor < least_minor)
        throw SessionError("ONNX Runtime " + OrtBackend::version() +
                           " computes wrong products of bytes on this processor, so a w8a8 bundle "
                           "would give wrong text; use version 1." +
                           std::to_string(least_minor) + " or newer, or mars-export-kernels");
    OrtOptions both = unsigned_weights;
    both.insert(entries.begin(), entries.end());
    if (const std::optional<std::int64_t> rows = inexact(env, both))
        throw SessionError("ONNX Runtime " + OrtBackend::version() + " computes wrong products of bytes on this processor (" + processor() +
                           "), in steps of " + std::to_string(*rows) +
                           " slots, so a w8a8 bundle would give wrong text; use another version of ONNX Runtime, or make the bundle with "
                           "--precision int8");
    return unsigned_weights;
}

} // namespace

OrtOptions exact_entries(const Ort::Env& env, const OrtOptions& entries) {
    static const OrtOptions found = find(env, entries);
    return found;
}

} // namespace mars
