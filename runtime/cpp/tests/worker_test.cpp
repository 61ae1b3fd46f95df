// The one thread that has to do with a GPU.
#include <atomic>
#include <future>
#include <memory>
#include <ostream>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <mars/errors.hpp>

#include "device/worker.hpp"

TEST_CASE("the worker does what is asked in one thread, work of work too, and ends with its last owner") {
    auto worker = std::make_shared<mars::Worker>();
    const auto there = worker->run([] { return std::this_thread::get_id(); });
    CHECK(there != std::this_thread::get_id());
    CHECK(worker->run([&] { return worker->run([] { return std::this_thread::get_id(); }); }) == there);
    CHECK_THROWS_AS(worker->run([] { throw mars::SessionError("no"); }), mars::SessionError);
    std::atomic<int> done{0};
    {
        std::vector<std::future<void>> threads;
        for (int i = 0; i < 4; ++i)
            threads.push_back(std::async(std::launch::async, [&] {
                for (int n = 0; n < 200; ++n) worker->run([&] { ++done; });
            }));
    }
    CHECK(done == 800);
    mars::Worker& last = *worker;
    last.run([&] { worker.reset(); }); // by work of its own
    const std::shared_ptr<mars::Worker> one = mars::Worker::shared();
    CHECK(mars::Worker::shared() == one);
}
