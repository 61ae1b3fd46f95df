// Devices that fail: without room for long rows, or at a copy of a row.
#pragma once

#include <mars/errors.hpp>

#include "fake.hpp"

namespace fake {

/// A device without room for rows of more than `most` entries, which fails on request.
class Narrow : public Backend {
  public:
    void step(mars::Cache& cache, std::int64_t first, const mars::StepInput& input, bool logits, mars::StepOutput& output) override {
        if (broken) throw mars::DeviceError("the device is gone");
        for (const std::int64_t length : input.kv_length)
            if (length + input.slots > most) throw mars::MemoryError("no memory for " + std::to_string(length) + " entries");
        Backend::step(cache, first, input, logits, output);
    }

    bool broken = false;
    std::int64_t most = 1000000;
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
