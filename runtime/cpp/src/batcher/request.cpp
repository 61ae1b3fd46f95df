#include "batcher/request.hpp"

#include <algorithm>

#include "joined.hpp"

namespace mars {

RequestState::RequestState(std::shared_ptr<const Opened> opened, NewSequence made, End how, std::optional<Clock::time_point> until,
                           std::optional<std::string> of, OnEvent callback)
    : session(std::move(opened)), text(std::move(made.text)), seq(std::move(made.seq)), client(std::move(of)), end_(std::move(how)),
      until_(until), callback_(std::move(callback)) {
    seen_.stats = seq->stats;
}

/// Wait until `is_enough`, at most until `last`. A reader checks the deadline itself, because the batcher's thread may
/// hang in a step.
bool RequestState::wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& is_enough, Clock::time_point last) {
    if (::getpid() != process_ && !is_enough()) throw SessionError("this request belongs to the process that was forked");
    while (!is_enough()) {
        const bool has_ended = !is_over() && until_ && Clock::now() >= *until_;
        if (has_ended) {
            lock.unlock();
            end_(seq->index, FinishReason::deadline);
            lock.lock();
            if (is_enough()) return true;
        }
        if (Clock::now() >= last) return false;
        changed_.wait_until(lock, until_ && !has_ended ? std::min(last, *until_) : last);
    }
    return true;
}

std::optional<Event> RequestState::next() {
    if (callback_) throw SessionError("the events of this request go to its callback; wait for its result");
    std::unique_lock<std::mutex> lock(mutex_);
    wait(lock, [this] { return !events_.empty() || is_over(); }, Clock::now() + duration_of(forever, ""));
    if (!has_event() && error_) std::rethrow_exception(error_);
    return take();
}

/// The next event, including the end that came between two steps; no value if there is none. The lock is held.
std::optional<Event> RequestState::take() {
    if (!has_event()) return std::nullopt;
    if (events_.empty()) {
        Event end{seen_.text.substr(std::min(shown_, seen_.text.size())), {}, {}, reason_, 0, 0};
        is_told_ = true;
        return end;
    }
    Event event = std::move(events_.front());
    events_.pop_front();
    return event;
}

Completion RequestState::result(std::optional<double> timeout) {
    const Clock::time_point last = Clock::now() + duration_of(timeout.value_or(forever), "timeout");
    {
        std::unique_lock<std::mutex> lock(mutex_);
        if (!wait(lock, [this] { return is_over(); }, last))
            throw SessionError("the answer is not finished after " + printed("%g", timeout.value_or(forever)) +
                               " seconds; it continues: wait again or cancel it");
    }
    call(); // the result's reader has seen all events
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    return seen_;
}

void RequestState::abandon() noexcept {
    if (::getpid() != process_) return;
    cancel();
    const std::lock_guard<std::recursive_mutex> lock(calling_);
    is_abandoned_ = true; // the callback is kept, since this may be called from it
}

void RequestState::deliver(const Accepted& accepted) {
    Event event = event_of(accepted, text.get());
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_over()) return; // ended while the step ran: too late
    seen_.token_ids.insert(seen_.token_ids.end(), accepted.token_ids.begin(), accepted.token_ids.end());
    seen_.confidences.insert(seen_.confidences.end(), accepted.confidences.begin(), accepted.confidences.end());
    if (text) seen_.text = text->text();
    seen_.stats = seq->stats;
    seen_.stats.tokens = static_cast<std::int64_t>(seen_.token_ids.size()); // the sequence may have those of this step's next event
    shown_ += event.text.size();
    events_.push_back(std::move(event));
    last_ = accepted.finish_reason;
    if (last_) seen_.finish_reason = *last_;
    changed_.notify_all();
}

void RequestState::call() {
    if (!callback_) return;
    const std::lock_guard<std::recursive_mutex> calling(calling_);
    while (!is_abandoned_) {
        std::unique_lock<std::mutex> lock(mutex_);
        const std::optional<Event> event = take();
        lock.unlock();
        if (!event) return;
        if (callback_(*event) && !event->finish_reason) cancel();
    }
}

const Completion& RequestState::conclude(FinishReason reason, std::exception_ptr error) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    reason_ = seen_.finish_reason = last_.value_or(reason);
    error_ = std::move(error);
    if (seen_.stats.queue_time == 0) // it never had a sequence
        seen_.stats.queue_time = std::chrono::duration<double>(Clock::now() - seen_.stats.began).count();
    is_told_ = error_ || last_;
    changed_.notify_all();
    return seen_;
}

Request::Request(std::shared_ptr<RequestState> answer) : answer_(std::move(answer)) {}

Request::~Request() {
    if (answer_) answer_->abandon();
}

Request& Request::operator=(Request&& other) noexcept {
    if (this != &other) {
        if (answer_) answer_->abandon();
        answer_ = std::move(other.answer_);
    }
    return *this;
}

std::optional<Event> Request::next() { return answer_->next(); }
Completion Request::result(std::optional<double> timeout) { return answer_->result(timeout); }
void Request::cancel() { answer_->cancel(); }
Completion Request::completion() const { return answer_->completion(); }
std::optional<FinishReason> Request::finish_reason() const { return answer_->finish_reason(); }
bool Request::failed() const { return answer_->failed(); }
std::optional<double> Request::tau() const { return answer_->seq->tau(); }
void Request::set_tau(double tau) { answer_->seq->set_tau(tau); }
void Request::set_exact(bool exact) { answer_->seq->set_exact(exact); }

} // namespace mars
