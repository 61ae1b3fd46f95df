// One thread for everything that ONNX Runtime does on a GPU while it captures steps. Names no library. Twin of runtime/device/ort_worker.py.
//
// A captured step belongs to the thread that captured it, and a call to CUDA from another thread while a step is being captured breaks the
// capture. So all sessions of a process that capture share this thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

namespace mars {

/// A thread that ends with its last owner, which may be work of its own.
class Worker {
  public:
    /// The one of all sessions that capture; it lives as long as one of them. Throws MemoryError.
    static std::shared_ptr<Worker> shared();

    Worker();
    ~Worker();
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    /// What `work` returns or throws, done in the thread. Work may ask for work.
    template <typename Work>
    auto run(const Work& work) -> decltype(work()) {
        if (is_here()) return work();
        if constexpr (std::is_void_v<decltype(work())>) {
            wait_for([&] { work(); });
        } else {
            std::optional<decltype(work())> result;
            wait_for([&] { result.emplace(work()); });
            return std::move(*result);
        }
    }

  private:
    /// Of who waits for it, on his stack: the thread is through with it when it is done.
    struct Task {
        const std::function<void()>& work;
        std::exception_ptr error;
        bool is_done = false;
    };

    struct Queue {
        std::mutex mutex;
        std::condition_variable changed, finished;
        std::deque<Task*> tasks;
        bool is_over = false;
    };

    bool is_here() const { return std::this_thread::get_id() == thread_.get_id(); }
    void wait_for(const std::function<void()>& work);

    const std::shared_ptr<Queue> queue_; // the thread may outlive this object, for as long as it takes to end
    std::thread thread_;
};

/// Work that is to be done in a thread of its own, where there is one.
template <typename Work>
auto run_in(const std::shared_ptr<Worker>& worker, const Work& work) -> decltype(work()) {
    return worker ? worker->run(work) : work();
}

} // namespace mars
