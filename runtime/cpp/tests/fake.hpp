// A backend without a model: its KV entries are the tokens themselves, and it fails when a wanted output would see a stale one.
#pragma once

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <utility>

#include "decode/backend.hpp"

namespace fake {

using Tokens = std::vector<std::int64_t>;

constexpr std::int64_t mask = 0; // its other tokens are 1, 2, ...

/// (known prefix, number of masks after it) -> (token, confidence)
using Predict = std::function<std::pair<std::int64_t, float>(const Tokens&, std::int64_t)>;

inline std::uint64_t mix(std::uint64_t z) {
    z += 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31U);
}

/// The model of tests/conformance/make_loops.py.
inline std::pair<std::int64_t, float> hashed(const Tokens& known, std::int64_t masks) {
    std::uint64_t state = 0;
    for (const std::int64_t token : known) state = mix(state ^ static_cast<std::uint64_t>(token));
    state = mix(state ^ static_cast<std::uint64_t>(masks + 1000));
    return {1 + static_cast<std::int64_t>((state >> 40U) % 12), static_cast<float>(state & 0xFFFFFFU) / 16777216.0F};
}

struct Saved : mars::Saved {
    explicit Saved(Tokens tokens) : mars::Saved(static_cast<std::int64_t>(tokens.size())), entries(std::move(tokens)) {}
    const Tokens entries;
};

class Cache : public mars::Cache {
  public:
    explicit Cache(std::int64_t num_rows) : entries(static_cast<std::size_t>(num_rows)) {}

    std::int64_t capacity() const override { return capacity_; }

    /// What it must keep, and no more.
    void reserve(std::int64_t capacity, const std::vector<std::int64_t>& lengths) override {
        if (capacity > capacity_) resize(capacity, lengths);
    }

    void shrink(std::int64_t capacity, const std::vector<std::int64_t>& lengths) override { resize(capacity, lengths); }

    void resize(std::int64_t capacity, const std::vector<std::int64_t>& lengths) {
        capacity_ = capacity;
        for (std::size_t row = 0; row < entries.size(); ++row) {
            entries[row].resize(static_cast<std::size_t>(row < lengths.size() ? lengths[row] : 0));
            entries[row].resize(static_cast<std::size_t>(capacity_), -1);
        }
    }

    void release(std::int64_t row) override {
        Tokens& of = entries[static_cast<std::size_t>(row)];
        std::fill(of.begin(), of.end(), -1);
    }

    void move(std::int64_t source, std::int64_t target, std::int64_t length) override {
        const Tokens& from = entries[static_cast<std::size_t>(source)];
        std::copy_n(from.begin(), length, entries[static_cast<std::size_t>(target)].begin());
    }

    std::int64_t entry_bytes() const override { return 8; }

    /// All that may not be saved is poisoned: it must never be seen again.
    std::shared_ptr<const mars::Saved> save(std::int64_t row, std::int64_t length) override {
        const Tokens& from = entries[static_cast<std::size_t>(row)];
        for (std::int64_t i = 0; i < length; ++i)
            if (from[static_cast<std::size_t>(i)] <= mask) throw std::logic_error("only what is known may be saved");
        return std::make_shared<Saved>(Tokens(from.begin(), from.begin() + length));
    }

    void load(std::int64_t row, const mars::Saved& saved, std::int64_t length) override {
        if (saved.length > capacity_) throw std::logic_error("the loop must reserve what is loaded");
        Tokens& to = entries[static_cast<std::size_t>(row)];
        std::fill(to.begin(), to.end(), -1);
        std::copy_n(dynamic_cast<const Saved&>(saved).entries.begin(), length, to.begin());
    }

    std::vector<Tokens> entries;

  private:
    std::int64_t capacity_ = 0;
};

class Backend : public mars::Backend {
  public:
    explicit Backend(Predict predict = hashed, std::int64_t max_capacity = 1000000, std::optional<std::int64_t> max_slots = std::nullopt,
                     std::optional<std::int64_t> max_outputs = std::nullopt)
        : predict_(std::move(predict)), max_capacity_(max_capacity), max_slots_(max_slots), max_outputs_(max_outputs) {}

    const std::vector<std::string>& outputs() const override { return outputs_; }
    std::optional<std::int64_t> max_slots() const override { return max_slots_; }
    std::optional<std::int64_t> max_outputs() const override { return max_outputs_; }
    std::int64_t max_capacity() const override { return max_capacity_; }
    std::unique_ptr<mars::Cache> new_cache(std::int64_t num_rows) override { return std::make_unique<Cache>(num_rows); }

    void step(mars::Cache& cache, std::int64_t first, const mars::StepInput& input, bool, mars::StepOutput& output) override {
        auto& entries = dynamic_cast<Cache&>(cache).entries;
        if (record) steps.push_back(input);
        if (max_outputs_ && input.outputs > *max_outputs_) throw std::logic_error("more predictions than the device gives");
        output.outputs = input.outputs;
        output.token_ids.clear();
        output.confidence.clear();
        for (std::int64_t i = 0; i < input.rows; ++i) {
            const std::int64_t start = input.kv_length[static_cast<std::size_t>(i)];
            if (start + input.slots > cache.capacity()) throw std::logic_error("the loop must reserve what a step writes");
            Tokens& row = entries[static_cast<std::size_t>(first + i)];
            std::copy_n(input.input_ids.begin() + i * input.slots, input.slots, row.begin() + start);
            for (std::int64_t j = 0; j < input.outputs; ++j) {
                const std::int64_t slot = input.output_index[static_cast<std::size_t>(i * input.outputs + j)];
                Tokens known(row.begin(), row.begin() + start + slot + 1);
                const auto seen = static_cast<std::int64_t>(known.size());
                while (!known.empty() && known.back() == mask) known.pop_back();
                for (const std::int64_t token : known)
                    if (token == mask || token == -1) throw std::logic_error("a stale entry is attended to");
                const auto [token, confidence] = predict_(known, seen - static_cast<std::int64_t>(known.size()));
                output.token_ids.push_back(token);
                output.confidence.push_back(confidence);
            }
        }
    }

    std::optional<std::int64_t> reproducible_slots() const override { return reproducible; }

    std::optional<std::int64_t> reproducible = 1;
    bool record = false;                // for one thread only
    std::vector<mars::StepInput> steps; // those that were run since

  private:
    std::vector<std::string> outputs_{"token_ids", "confidence"};
    Predict predict_;
    std::int64_t max_capacity_;
    std::optional<std::int64_t> max_slots_, max_outputs_;
};

} // namespace fake
