// A queue and a loop.
#include "device/worker.hpp"

#include <utility>

namespace mars {

std::shared_ptr<Worker> Worker::shared() {
    static std::mutex mutex;
    static std::weak_ptr<Worker> known;
    const std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<Worker> worker = known.lock();
    if (!worker) known = worker = std::make_shared<Worker>();
    return worker;
}

Worker::Worker()
    : queue_(std::make_shared<Queue>()), thread_([queue = queue_] {
          std::unique_lock<std::mutex> lock(queue->mutex);
          for (;;) {
              queue->changed.wait(lock, [&] { return queue->is_over || !queue->works.empty(); });
              if (queue->works.empty()) return;
              std::function<void()> work = std::move(queue->works.front());
              queue->works.pop_front();
              lock.unlock();
              work();
              work = nullptr; // what goes with it may ask for the lock
              lock.lock();
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

void Worker::put(std::function<void()> work) {
    {
        const std::lock_guard<std::mutex> lock(queue_->mutex);
        queue_->works.push_back(std::move(work));
    }
    queue_->changed.notify_one();
}

} // namespace mars
