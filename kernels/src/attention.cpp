// The operator `mars_export::Attention` for ONNX Runtime. The exported graph has the same as a function of standard operators.
#include "attention.hpp"

#include <cstring>

#include "ort.hpp"

namespace mars::kernels {
namespace {

using Shape = std::vector<int64_t>;

enum Input { Q, K, V, PAST_KEY, PAST_VALUE, KV_LENGTH, SCALE, WINDOW, NUM_INPUTS };

Shape shape_of(const Ort::ConstValue& value) { return value.GetTensorTypeAndShapeInfo().GetShape(); }

struct AttentionKernel {
    static constexpr const char* NAME = "Attention";
    static constexpr std::string_view INPUTS = "fffbbifi", OUTPUTS = "fbb"; // see Input; attended, keys, values

    const AttentionCode& code;

    explicit AttentionKernel(const OrtKernelInfo*) : code(attention_code(chosen().name)) {}

    void compute(const Ort::KernelContext& context) const {
        const Shape q = shape_of(context.GetInput(Q)), entries = shape_of(context.GetInput(PAST_KEY));
        require(q.size() == 4 && entries.size() == 4, "Attention: q and the entries have four axes");
        const int64_t rows = q[0], heads = q[1], slots = q[2], dims = q[3], kv_heads = entries[1], capacity = entries[2];
        require(kv_heads > 0 && heads % kv_heads == 0 && dims > 0 && dims % 4 == 0 && dims <= static_cast<int64_t>(MOST_DIMS),
                "Attention: query heads must be a multiple of key heads, and a head a multiple of 4, at most 512");
        const Shape fresh{rows, kv_heads, slots, dims};
        require(shape_of(context.GetInput(K)) == fresh && shape_of(context.GetInput(V)) == fresh,
                "Attention: k and v must have the slots of q");
        require(entries == Shape{rows, kv_heads, capacity, dims + static_cast<int64_t>(SCALE_BYTES)} &&
                    shape_of(context.GetInput(PAST_VALUE)) == entries,
                "Attention: entries must be [rows, key heads, capacity, a head and its scale]");
        require(shape_of(context.GetInput(KV_LENGTH)) == Shape{rows}, "Attention: kv_length must have one number for each row");
        const auto* start = context.GetInput(KV_LENGTH).GetTensorData<int64_t>();
        for (int64_t row = 0; row < rows; ++row)
            require(start[row] >= 0 && start[row] <= capacity - slots, "Attention: kv_length and the slots must be within the capacity");
        for (const Input one : {SCALE, WINDOW})
            require(context.GetInput(one).GetTensorTypeAndShapeInfo().GetElementCount() == 1,
                    "Attention: scale and window are one number each");
        const int64_t window = *context.GetInput(WINDOW).GetTensorData<int64_t>();
        require(window > 0, "Attention: the window must be 1 or more");
        const size_t count = static_cast<size_t>(rows * kv_heads * capacity * entries[3]);
        const Attention call{context.GetInput(Q).GetTensorData<float>(),
                             context.GetInput(K).GetTensorData<float>(),
                             context.GetInput(V).GetTensorData<float>(),
                             written(context, 1, PAST_KEY, entries, count),
                             written(context, 2, PAST_VALUE, entries, count),
                             start,
                             *context.GetInput(SCALE).GetTensorData<float>(),
                             window,
                             context.GetOutput(0, Shape{rows, slots, heads * dims}).GetTensorMutableData<float>(),
                             static_cast<size_t>(rows),
                             static_cast<size_t>(heads),
                             static_cast<size_t>(kv_heads),
                             static_cast<size_t>(slots),
                             static_cast<size_t>(capacity),
                             static_cast<size_t>(dims)};
        if (rows == 0 || slots == 0) return;
        attend(code, call, Threads{context});
    }

    // The entries of an output: those of the input, usually in the same memory.
    static int8_t* written(const Ort::KernelContext& context, size_t output, size_t input, const Shape& shape, size_t count) {
        const auto* past = context.GetInput(input).GetTensorData<int8_t>();
        auto* present = context.GetOutput(output, shape).GetTensorMutableData<int8_t>();
        if (past != present && count > 0) std::memcpy(present, past, count);
        return present;
    }
};

} // namespace

const OrtCustomOp* attention() {
    static const Operator<AttentionKernel> made;
    return &made;
}

} // namespace mars::kernels
