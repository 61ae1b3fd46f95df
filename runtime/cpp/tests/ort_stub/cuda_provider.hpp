// ONNX Runtime as if it had a CUDA provider that captures runs. A program that links this finds it in place of the library's C interface: it
// computes on the CPU, and refuses or punishes with wrong numbers what the provider does. Twin of tests/support/fake_ort_cuda.py.
//
// Read in onnxruntime's sources (cuda_execution_provider.cc, cuda_graph.cc, inference_session.cc): a session with `enable_cuda_graph` captures a
// run under its `gpu_graph_id` (0 where none is given) after two more runs of the same inputs, in the thread that asks for it; a later run of
// that number in that thread is replayed with the addresses and shapes of the capture, whatever is bound, and copies no result to the host; -1
// captures and replays nothing. A captured run goes on writing where the session's own allocator had its intermediate results.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

struct OrtStub {
    struct Run {
        std::int64_t number;
        std::string how; // plain, captured, replayed
    };

    std::string refusal;    // a session that should capture is refused with these words
    std::string no_session; // any session of the provider is
    std::function<bool(const std::string&)> on_host = [](const std::string&) { return false; }; // inputs that the graph reads there
    bool is_stale = false;   // an operator on the CPU computes with lengths, which replays do not see
    std::size_t failing = 0; // from this run of sessions that capture on, those with a number fail
    std::string failure;

    std::vector<Run> runs;                                   // of sessions that capture
    std::set<std::pair<std::int64_t, std::int64_t>> sizes;   // slots and predictions of captured runs
    std::set<std::thread::id> threads;                       // that called CUDA while there was a session that captures
    std::vector<std::map<std::string, std::string>> options; // of each session of the provider
    std::vector<std::string> violations;                     // rules that were broken
    std::size_t live = 0;                                    // blocks of its memory

    std::size_t count(const std::string& how) const;
};

/// The one there is; a test begins with a new one. Not to be read while a session is at work.
OrtStub& ort_stub();
