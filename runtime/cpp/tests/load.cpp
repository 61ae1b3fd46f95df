// Many threads on one session through the C interface, with hands on their streams: mars-load BUNDLE THREADS REQUESTS.
// Prints the resident memory after each tenth of the requests, so that growth shows; exits with 1 when an answer differs.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <thread>
#include <unistd.h>
#include <vector>

#include <mars/mars.h>

namespace {

void require(mars_status status, mars_error* error) {
    if (status == MARS_OK) return;
    std::fprintf(stderr, "mars-load: %s\n", mars_error_message(error));
    std::exit(1);
}

mars_prompt prompt_of(const std::vector<std::int64_t>& ids) {
    mars_prompt prompt;
    mars_prompt_init(&prompt, sizeof prompt);
    prompt.token_ids = ids.data();
    prompt.num_token_ids = ids.size();
    return prompt;
}

std::vector<std::int64_t> answer(const mars_session* session, const std::vector<std::int64_t>& ids, const mars_config& config) {
    const mars_prompt prompt = prompt_of(ids);
    mars_completion* completion = nullptr;
    mars_error* error = nullptr;
    require(mars_generate(session, &prompt, &config, nullptr, nullptr, &completion, &error), error);
    std::size_t size = 0;
    const std::int64_t* first = mars_completion_token_ids(completion, &size);
    std::vector<std::int64_t> made(first, first + size);
    mars_completion_free(completion);
    return made;
}

/// A stream whose tau another thread changes all the time, and which it cancels in the end.
void meddled(const mars_session* session, const std::vector<std::int64_t>& ids, const mars_config& config) {
    const mars_prompt prompt = prompt_of(ids);
    mars_stream* stream = nullptr;
    mars_error* error = nullptr;
    require(mars_stream_open(session, &prompt, &config, &stream, &error), error);
    std::thread hand([stream] {
        for (int i = 0; i < 20; ++i) mars_stream_set_tau(stream, i % 2 == 0 ? 0.2 : 1.0, nullptr);
        mars_stream_cancel(stream);
    });
    std::int32_t done = 0;
    while (done == 0) {
        mars_event event{};
        event.struct_size = sizeof event;
        require(mars_stream_next(stream, &event, &done, &error), error);
    }
    hand.join();
    mars_stream_close(stream);
}

long resident_kib() {
    std::ifstream file("/proc/self/statm");
    long whole = 0, resident = 0;
    file >> whole >> resident;
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

} // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fputs("usage: mars-load BUNDLE THREADS REQUESTS\n", stderr);
        return 2;
    }
    const int num_threads = std::atoi(argv[2]), num_requests = std::atoi(argv[3]);
    mars_session_options options;
    mars_session_options_init(&options, sizeof options);
    options.threads = 1;
    mars_session* session = nullptr;
    mars_error* error = nullptr;
    require(mars_session_open(argv[1], &options, &session, &error), error);
    mars_config config;
    mars_config_init(&config, sizeof config);
    config.tau = 0.5;
    config.masks = MARS_MASKS_FULL;
    config.max_new_tokens = 40;
    const std::vector<std::int64_t> ids{5, 6, 7, 8};
    const std::vector<std::int64_t> expected = answer(session, ids, config);
    std::atomic<int> wrong{0}, finished{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < num_threads; ++i)
        threads.emplace_back([&] {
            for (int request = 0; request < num_requests; ++request) {
                if (answer(session, ids, config) != expected) ++wrong;
                meddled(session, ids, config);
                const int count = ++finished, step = std::max(1, num_threads * num_requests / 10);
                if (count % step == 0) std::printf("%d requests: %ld KiB resident\n", count, resident_kib());
            }
        });
    for (std::thread& thread : threads) thread.join();
    mars_session_close(session);
    std::printf("%d threads x %d requests, %d wrong answers\n", num_threads, num_requests, wrong.load());
    return wrong == 0 ? 0 : 1;
}
