// Any bytes as an ONNX file: what it takes from other files, or no graph at all.
#include "bundle/external.hpp"
#include "fuzz.hpp"

namespace {

std::string field(int number, const std::string& content) {
    std::string made(1, static_cast<char>(number << 3 | 2));
    for (std::size_t size = content.size(); true; size >>= 7U) {
        made += static_cast<char>(size < 128 ? size : (size & 127U) | 128U);
        if (size < 128) return made + content;
    }
}

} // namespace

std::vector<std::string> seeds() {
    const std::string data = field(13, field(1, "location") + field(2, "weights.bin"));
    const std::string tensor = std::string("\x08\x04\x10\x07", 4) + data, list = std::string("\x08\xC0\x84\x3D\x10\x07", 6);
    const std::string node = field(1, field(5, field(5, tensor) + field(22, field(1, tensor)) + field(6, field(5, tensor))));
    std::string large = field(7, field(5, tensor + field(9, std::string(5000, 'x'))) + node);
    return {field(7, field(5, tensor) + node), large, field(7, field(5, list)), field(25, field(7, node) + field(11, field(6, ""))),
            field(20, field(1, field(5, field(1, std::string(20, '\x01')) + tensor)))};
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view input(reinterpret_cast<const char*>(data), size);
    if (const auto found = mars::graph_contents(input)) require(!input.empty(), "an empty file is no graph");
    return 0;
}
