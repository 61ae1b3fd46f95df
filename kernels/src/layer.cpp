// The operators `mars_export::LayerStart` and `LayerEnd`: a decoder layer before and after its attention. ONNX Runtime's own operators compute
// what has other last bits in its other versions and on other processors: norms, rotations and SiLU.
#include <array>
#include <cstdlib>
#include <cstring>

#include "ort.hpp"

namespace mars::kernels {

namespace {

using Shape = std::vector<int64_t>;

// At least `count` numbers of this thread that the next call with the same `Use` gives again.
template <int Use>
float* memory(size_t count) {
    static thread_local std::vector<float> numbers;
    if (numbers.size() < count) numbers.resize(count);
    return numbers.data();
}

// Calls part(from, to) with a few rows at a time, whose numbers fit into a core's second cache beside the weights.
template <class Part>
void in_pieces(size_t rows, Part part) {
    constexpr size_t MOST_ROWS = 64;
    const size_t pieces = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (size_t piece = 0; piece < pieces; ++piece) part(rows * piece / pieces, rows * (piece + 1) / pieces);
}

Ort::Value value_of(float* numbers, const Shape& shape) {
    static const Ort::MemoryInfo cpu = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
    size_t count = 1;
    for (const int64_t size : shape) count *= static_cast<size_t>(size);
    return Ort::Value::CreateTensor<float>(cpu, numbers, count, shape.data(), shape.size());
}

// An operator of ONNX Runtime on tensors of floats, with one output.
class StandardOperator {
  public:
    StandardOperator(const OrtKernelInfo* info, const char* domain, const char* name, int version, size_t inputs,
                     std::vector<std::pair<const char*, ONNXTensorElementDataType>> types, const Ort::OpAttr* attributes, size_t count) {
        std::vector<const char*> names;
        std::vector<ONNXTensorElementDataType> values;
        for (const auto& [type, value] : types) names.push_back(type), values.push_back(value);
        op = Ort::Op::Create(info, name, domain, version, names.data(), values.data(), types.size(), attributes, count, inputs, 1);
        // ONNX Runtime's list of these operators ends before a session in static storage that was opened later than it was made.
        static const int once = std::atexit([] { is_ending = true; });
        static_cast<void>(once);
    }
    StandardOperator(const StandardOperator&) = delete;
    ~StandardOperator() {
        if (is_ending) op.release();
    }

    void operator()(const Ort::KernelContext& context, std::initializer_list<const OrtValue*> inputs, OrtValue* output) const {
        Ort::ThrowOnError(
            Ort::GetApi().InvokeOp(context.GetOrtKernelContext(), op, inputs.begin(), static_cast<int>(inputs.size()), &output, 1));
    }

  private:
    inline static bool is_ending = false; // the process, or the use of this library
    Ort::Op op{nullptr};
};

constexpr auto FLOAT = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;

StandardOperator rms_norm(const OrtKernelInfo* info) {
    const auto epsilon = Ort::ConstKernelInfo(info).GetAttribute<float>("epsilon");
    const int64_t axis = -1;
    const std::array attributes{Ort::OpAttr("epsilon", &epsilon, 1, ORT_OP_ATTR_FLOAT), Ort::OpAttr("axis", &axis, 1, ORT_OP_ATTR_INT)};
    return {info, "", "RMSNormalization", 23, 2, {{"T", FLOAT}, {"V", FLOAT}}, attributes.data(), attributes.size()};
}

StandardOperator rotary_embedding(const OrtKernelInfo* info) {
    const int64_t zero = 0;
    const std::array attributes{Ort::OpAttr("interleaved", &zero, 1, ORT_OP_ATTR_INT), Ort::OpAttr("num_heads", &zero, 1, ORT_OP_ATTR_INT),
                                Ort::OpAttr("rotary_embedding_dim", &zero, 1, ORT_OP_ATTR_INT)};
    return {info,
            "",
            "RotaryEmbedding",
            23,
            3,
            {{"T", FLOAT}, {"M", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64}},
            attributes.data(),
            attributes.size()};
}

// To which ONNX Runtime fuses x * Sigmoid(x).
StandardOperator silu(const OrtKernelInfo* info) {
    const float alpha = 1;
    const Ort::OpAttr attribute("alpha", &alpha, 1, ORT_OP_ATTR_FLOAT);
    return {info, "com.microsoft", "QuickGelu", 1, 1, {{"T", FLOAT}}, &attribute, 1};
}

Shape shape_of(const Ort::ConstValue& value) { return value.GetTensorTypeAndShapeInfo().GetShape(); }

// hidden [b, s, hidden] -> q [b, num_heads, s, d], k and v [b, num_kv_heads, s, d], ready for attention
struct LayerStart {
    static constexpr const char* NAME = "LayerStart";
    static constexpr std::string_view INPUTS = "ffbfffF"; // hidden, norm, qkv and its scale, cos and sin [b, s, d / 2], bias
    static constexpr std::string_view OUTPUTS = "fff";

    const size_t heads, kv_heads;
    const StandardOperator norm, rotate;
    const Packed qkv;

    explicit LayerStart(const OrtKernelInfo* info)
        : heads(count(info, "num_heads")), kv_heads(count(info, "num_kv_heads")), norm(rms_norm(info)), rotate(rotary_embedding(info)),
          qkv(packed_weights(info, 2)) {
        require(qkv.outputs % (heads + 2 * kv_heads) == 0, "LayerStart: qkv must have num_heads + 2 num_kv_heads heads", ORT_INVALID_GRAPH);
    }

    static size_t count(const OrtKernelInfo* info, const char* name) {
        const auto value = Ort::ConstKernelInfo(info).GetAttribute<int64_t>(name);
        require(value > 0 && value < 1 << 20, "LayerStart: num_heads and num_kv_heads must be positive", ORT_INVALID_GRAPH);
        return static_cast<size_t>(value);
    }

    void compute(const Ort::KernelContext& context) const {
        const Threads threads{context};
        const auto hidden = context.GetInput(0), cos = context.GetInput(4), sin = context.GetInput(5), bias = context.GetInput(6);
        const Shape shape = shape_of(hidden);
        const size_t d = qkv.outputs / (heads + 2 * kv_heads);
        const auto inputs = static_cast<size_t>(shape.size() == 3 ? shape[2] : 0);
        require(qkv.fits(inputs), "LayerStart: hidden must be [batch, slots, inputs]");
        require(!bias || shape_of(bias) == Shape{static_cast<int64_t>(qkv.outputs)}, "LayerStart: bias must be [outputs]");
        const auto slots = static_cast<size_t>(shape[1]), rows = static_cast<size_t>(shape[0]) * slots;
        const Shape q_shape{shape[0], static_cast<int64_t>(heads), shape[1], static_cast<int64_t>(d)};
        const Shape kv_shape{shape[0], static_cast<int64_t>(kv_heads), shape[1], static_cast<int64_t>(d)};
        const auto q = context.GetOutput(0, q_shape), k = context.GetOutput(1, kv_shape);
        float* v = context.GetOutput(2, kv_shape).GetTensorMutableData<float>();

        float *normed = memory<0>(rows * inputs), *packed = memory<1>(rows * qkv.outputs);
        float *unrotated_q = memory<2>(rows * heads * d), *unrotated_k = memory<3>(rows * kv_heads * d);
        norm(context, {hidden, context.GetInput(1)}, value_of(normed, shape));
        const float* added = bias ? bias.GetTensorData<float>() : nullptr;
        const auto place = [&](size_t head, size_t row) { // of a head's numbers
            const size_t b = row / slots, slot = row % slots;
            if (head < heads) return unrotated_q + ((b * heads + head) * slots + slot) * d;
            head -= heads;
            return (head < kv_heads ? unrotated_k : v) + ((b * kv_heads + head % kv_heads) * slots + slot) * d;
        };
        multiply(codes_of(qkv, normed, rows, inputs, threads), {{qkv, packed}}, threads, [&](size_t from, size_t to) {
            for (size_t end; from < to; from = end) {
                const size_t head = from / d;
                end = std::min(to, (head + 1) * d);
                for (size_t row = 0; row < rows; ++row) {
                    float* numbers = packed + row * qkv.outputs;
                    if (added)
                        for (size_t i = from; i < end; ++i) numbers[i] += added[i];
                    std::memcpy(place(head, row) + from % d, numbers + from, (end - from) * sizeof(float));
                }
            }
        });
        rotate(context, {value_of(unrotated_q, q_shape), cos, sin}, q);
        rotate(context, {value_of(unrotated_k, kv_shape), cos, sin}, k);
    }
};

// attended [b, s, heads d] and the layer's input [b, s, hidden] -> its output [b, s, hidden]
struct LayerEnd {
    static constexpr const char* NAME = "LayerEnd";
    // attended, hidden, attention_output and its scale, norm, gate_up and its scale, down and its scale
    static constexpr std::string_view INPUTS = "ffbffbfbf";
    static constexpr std::string_view OUTPUTS = "f";

    const StandardOperator norm, activate;
    const Packed attention_output, down, gate, up;

    explicit LayerEnd(const OrtKernelInfo* info)
        : norm(rms_norm(info)), activate(silu(info)), attention_output(packed_weights(info, 2)), down(packed_weights(info, 7)),
          gate(packed_weights(info, 5, 0, 2)), up(packed_weights(info, 5, 1, 2)) {
        require(attention_output.outputs == down.outputs && gate.fits(down.outputs) && down.fits(gate.outputs),
                "LayerEnd: attention_output, gate_up and down must fit together", ORT_INVALID_GRAPH);
    }

    void compute(const Ort::KernelContext& context) const {
        const auto attended = context.GetInput(0), hidden = context.GetInput(1);
        const Shape shape = shape_of(hidden);
        const size_t width = down.outputs;
        const size_t rows = hidden.GetTensorTypeAndShapeInfo().GetElementCount() / width;
        require(shape.size() == 3 && shape[2] == static_cast<int64_t>(width), "LayerEnd: hidden must be [batch, slots, hidden]");
        const Shape given = shape_of(attended);
        const auto inputs = static_cast<size_t>(given.empty() ? 0 : given.back());
        require(attention_output.fits(inputs) && attended.GetTensorTypeAndShapeInfo().GetElementCount() == rows * inputs,
                "LayerEnd: attended must be [batch, slots, inputs]");
        const auto* mixed = attended.GetTensorData<float>();
        const auto* residual = hidden.GetTensorData<float>();
        float* out = context.GetOutput(0, shape).GetTensorMutableData<float>();
        in_pieces(rows, [&](size_t from, size_t to) {
            compute_rows(context, mixed + from * inputs, inputs, residual + from * width, out + from * width, to - from);
        });
    }

    void compute_rows(const Ort::KernelContext& context, const float* mixed, size_t inputs, const float* residual, float* out,
                      size_t rows) const {
        const Threads threads{context};
        const size_t width = down.outputs;
        float *added = memory<0>(rows * width), *normed = memory<1>(rows * width);
        float *gates = memory<2>(rows * gate.outputs), *ups = memory<3>(rows * gate.outputs), *active = memory<4>(rows * gate.outputs);
        const auto add_to = [=](const float* before) {
            return [=](size_t from, size_t to) {
                for (size_t row = 0; row < rows; ++row)
                    for (size_t i = row * width + from; i < row * width + to; ++i) out[i] = before[i] + added[i];
            };
        };
        const Shape narrow{static_cast<int64_t>(rows), static_cast<int64_t>(width)};
        const Shape wide{static_cast<int64_t>(rows), static_cast<int64_t>(gate.outputs)};

        multiply(codes_of(attention_output, mixed, rows, inputs, threads), {{attention_output, added}}, threads, add_to(residual));
        norm(context, {value_of(out, narrow), context.GetInput(4)}, value_of(normed, narrow));
        multiply(codes_of(gate, normed, rows, width, threads), {{gate, gates}, {up, ups}}, threads);
        activate(context, {value_of(gates, wide)}, value_of(active, wide));
        const Codes gated = codes_of(down, active, rows, gate.outputs, threads, [&](size_t from, size_t to) {
            for (size_t i = from * gate.outputs; i < to * gate.outputs; ++i) active[i] *= ups[i];
        });
        multiply(gated, {{down, added}}, threads, add_to(out));
    }
};

} // namespace

const OrtCustomOp* layer_start() {
    static const Operator<LayerStart> made;
    return &made;
}

const OrtCustomOp* layer_end() {
    static const Operator<LayerEnd> made;
    return &made;
}

} // namespace mars::kernels
