// A queue and a loop.
#include "device/worker.hpp"

#include <string>
#include <system_error>

#include <mars/errors.hpp>

namespace mars {

std::shared_ptr<Worker> Worker::shared() {
    static std::mutex mutex;
    static std::weak_ptr<Worker> known;
    const std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<Worker> worker = known.lock();
    if (worker) return worker;
    try {
        known = worker = std::make_shared<Worker>();
    } catch (const std::system_error& error) {
        throw MemoryError(std::string("the thread that captures steps cannot be started (") + error.what() +
                          "); free memory, or allow more threads");
    }
    return worker;
}

Worker::Worker()
    : queue_(std::make_shared<Queue>()), thread_([queue = queue_] {
          std::unique_lock<std::mutex> lock(queue->mutex);
          for (;;) {
              queue->changed.wait(lock, [&] { return queue->is_over || !queue->tasks.empty(); });
              if (queue->tasks.empty()) return;
              Task& task = *queue->tasks.front();
              queue->tasks.pop_front();
              lock.unlock();
              try {
                  task.work();
              } catch (...) { // it is for who waits
                  task.error = std::current_exception();
              }
              lock.lock();
              task.is_done = true;
              queue->finished.notify_all();
          }
      }) {}

Worker::~Worker() {
    {
        const std::lock_guard<std::mutex> lock(queue_->mutex);
        queue_->is_over = true;
    }
    queue_->changed.notify_one();
    if (is_here())
        thread_.detach();
    else
        thread_.join();
}

void Worker::wait_for(const std::function<void()>& work) {
    const std::shared_ptr<Queue> queue = queue_; // the work may be this object's end
    Task task{work, nullptr, false};
    std::unique_lock<std::mutex> lock(queue->mutex);
    queue->tasks.push_back(&task);
    queue->changed.notify_one();
    queue->finished.wait(lock, [&] { return task.is_done; });
    lock.unlock();
    if (task.error) std::rethrow_exception(std::exchange(task.error, nullptr));
}

} // namespace mars
