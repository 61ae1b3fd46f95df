// What tests see and set of the GPU and the TensorRT that the stub plays. One state for the program; `reset` begins a test.
//
// The stub, and Python's counterpart (tests/support/fake_cuda.py, fake_engine.py), refuse what the real libraries refuse, and what would
// give wrong numbers on a real GPU, by TensorRT's headers and release notes and the CUDA runtime API:
// - A profile is chosen before the shapes, on the stream of the step; then every input has a shape and every tensor an address, a multiple
//   of 256 bytes. Past and present have one address if the engine writes in place, and different ones otherwise. Cursor and slots together
//   stay within the capacity.
// - Contexts share scratch memory of the largest profile, one at a time. A context, its memory, a graph and host arrays live until the
//   stream has used them; a context runs in one thread, on one stream at a time.
// - After its shapes change, a context runs once before a run can be captured. A graph is launched only while shapes, addresses and profile
//   are unchanged. During a capture nothing is allocated, freed, copied from or to the host, or waited for.
// - Copies stay inside one live allocation; source and target do not overlap. The GPU is the calling thread's current device, and the
//   thread's own choice is restored.
// - A reported error is cleared. After a sticky error (`cudaErrorIllegalAddress`, `LaunchFailure`) every call fails; nothing is retried,
//   and closing is silent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "../fake.hpp"

namespace stub {

using Shape = std::vector<std::int64_t>;

/// One execution context as it is bound.
struct Bound {
    std::int64_t range = -1;
    std::map<std::string, Shape> shapes;
    std::map<std::string, unsigned char*> addresses;
    int changes = 0; // times that it was bound to something else
};

/// What a driver may refuse of a capture.
enum class Refuses { nothing, begin, end, instantiate };

struct State {
    // what the machine is
    int num_devices = 1, driver = 12090, capability = 86;
    int gpu = 0;               // whose memory and streams everything is
    std::map<int, int> others; // GPUs of another capability
    std::vector<int> version{10, 16, 0, 72};
    // what it shall do
    fake::Predict predict = fake::hashed;
    std::function<fake::Tokens(std::int64_t, std::int64_t)> wide; // (position, first) -> the top-k of a prediction, if there is one
    std::int64_t num_ties = 0;                                    // candidates after the first that are as likely
    Refuses refuses = Refuses::nothing;
    bool fails = false, has_no_memory = false;
    bool breaks = false;    // the next step breaks the GPU
    int breaks_after = -1;  // after this many steps, the next one breaks the GPU; -1: never
    bool is_broken = false; // every call fails
    bool allocates = false; // in a step, which can then not be captured
    bool is_integrated = false;
    std::size_t context_bytes = 0; // of device memory that an execution context takes
    std::set<std::string> unknown_tensors;
    std::map<std::string, nlohmann::json> tensors; // by name: another `name`, `dtype`, `shape` or `alias`
    // what was done
    std::vector<std::pair<std::string, std::size_t>> events; // in the order of the stream
    std::map<unsigned char*, std::size_t> memory;            // allocated now
    std::map<unsigned char*, std::size_t> locked;            // the same of page-locked host memory
    std::vector<std::size_t> allocations;                    // sizes of all there ever were
    std::vector<Bound*> contexts;                            // in the order they were made; null when gone
    bool is_capturing = false, is_spoiled = false;           // a capture, by a call that it does not allow
    std::int64_t most_rows = 0;                              // of a step
    int waits = 0;                                           // for a stream
    int orphans = 0;                                         // graphs that went after their contexts
    int graphs = 0, launches = 0, forgotten = 0, compiled = 0, streams = 0, captures = 0;

    /// As a program finds it: the defaults, or what the variable MARS_STUB says in JSON: num_devices, gpu, capability, version,
    /// breaks_after.
    static State of_machine();
};

State& state();
void reset();

/// Which GPU is the calling thread's current one.
int& current();

/// The error of an earlier call in this thread that was not read yet.
cudaError_t& last_error();

/// Put work on a stream, or into the graph that is being captured. It is done when the stream is synchronized. `bound`: of the context
/// whose step it is; a graph cannot be launched when that is gone or bound to something else.
void submit(cudaStream_t stream, std::function<void()> work, const std::shared_ptr<Bound>& bound = nullptr);

/// Whether the stream is being captured.
bool is_capturing(cudaStream_t stream);

} // namespace stub
