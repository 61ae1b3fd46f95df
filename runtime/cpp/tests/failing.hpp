// Devices that fail: without room for long rows, or at a copy of a row.
#pragma once

#include <mars/errors.hpp>

#include "fake.hpp"

namespace fake {

/// A device without room for steps beyond `most` entries, or caches of more than `most_entries`, which fails on request.
class Narrow : public Backend {
  public:
    void step(mars::Cache& cache, std::int64_t first, const mars::StepInput& input, bool logits, mars::StepOutput& output) override {
        if (broken) throw mars::DeviceError("the device is gone");
        for (const std::int64_t length : input.kv_length)
            if (length + input.slots > most) throw mars::MemoryError("no memory for " + std::to_string(length) + " entries");
        Backend::step(cache, first, input, logits, output);
    }

    std::unique_ptr<mars::Cache> new_cache(std::int64_t num_rows) override {
        struct Limited : Cache {
            Limited(std::int64_t rows, Narrow& of) : Cache(rows), backend(of) {}
            void reserve(std::int64_t capacity, const std::vector<std::int64_t>& lengths) override {
                if (capacity > backend.most_entries) throw mars::MemoryError("no memory");
                Cache::reserve(capacity, lengths);
            }
            void shrink(std::int64_t capacity, const std::vector<std::int64_t>& lengths) override {
                Cache::shrink(capacity, lengths);
                backend.smallest = capacity;
            }
            Narrow& backend;
        };
        return std::make_unique<Limited>(num_rows, *this);
    }

    bool broken = false;
    std::int64_t most = 1000000, most_entries = 1000000, smallest = 1000000;
};

/// A device whose copy of a row number `failing` fails, counted from 1.
class Losing : public Backend {
  public:
    explicit Losing(std::int64_t number) : failing(number) {}

    std::unique_ptr<mars::Cache> new_cache(std::int64_t num_rows) override {
        struct Copies : Cache {
            Copies(std::int64_t rows, Losing& of) : Cache(rows), backend(of) {}
            void move(std::int64_t source, std::int64_t target, std::int64_t length) override {
                if (++backend.num_copies == backend.failing) throw mars::MemoryError("no memory for a copy");
                Cache::move(source, target, length);
            }
            Losing& backend;
        };
        return std::make_unique<Copies>(num_rows, *this);
    }

    const std::int64_t failing;
    std::int64_t num_copies = 0;
};

} // namespace fake
