// runtime/batcher/batcher.py: a batching service over one session, whose thread runs the steps.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <unistd.h>

#include <mars/batcher.hpp>

#include "batcher/admission_queue.hpp"
#include "batcher/request.hpp"
#include "decode/schedule.hpp"

namespace mars {

namespace {

using Clock = std::chrono::steady_clock;
using Client = std::optional<std::string>;

bool is_lost(const std::exception_ptr& error) {
    try {
        if (error) std::rethrow_exception(error);
    } catch (const DeviceLost&) {
        return true;
    } catch (...) { // the request's own
    }
    return false;
}

double since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

KvBudget budget_of(const Opened& opened, const Limits& limits) {
    const std::int64_t entry = std::max<std::int64_t>(opened.backend->new_cache(1)->entry_bytes(), 1);
    const std::int64_t capacity = opened.backend->max_capacity();
    const bool is_engine = opened.runs().is_engine(), is_host = opened.device.empty() || opened.device == "cpu";
    std::int64_t rows = limits.rows();
    std::optional<std::int64_t> num_bytes = limits.kv_bytes;
    if (const auto& net = opened.bundle.manifest.model.recurrent; net && num_bytes) {
        const double states = static_cast<double>(rows) * net->state_bytes(opened.backend->max_outputs().value_or(0));
        if (states >= static_cast<double>(*num_bytes))
            throw SessionError("kv_bytes: the recurrent layers' states of " + std::to_string(rows) + " rows take " +
                               std::to_string(std::llround(states / 1e6)) + " MB: give more, or fewer max_rows");
        *num_bytes -= static_cast<std::int64_t>(states);
    }
    if (limits.kv_bytes && is_engine) rows = std::max<std::int64_t>(1, std::min(rows, *limits.kv_bytes / (capacity * entry)));
    return {rows, num_bytes, entry, capacity, is_engine, is_host};
}

Limits with_rows(Limits limits, std::int64_t rows) {
    limits.max_rows = rows;
    return limits;
}

/// `limits` after checking, with a number of sequences that this session can run if the caller chose none.
Limits limits_for(const Opened& opened, Limits limits) {
    limits.check();
    const Variant& variant = opened.runs();
    if (!limits.max_rows) limits.max_rows = variant.engine ? std::min(limits.rows(), variant.engine->max_rows()) : limits.rows();
    return limits;
}

} // namespace

/// State shared by the batcher, its thread and its requests. A thread that hangs in a step may outlive the batcher.
struct Batcher::Service : std::enable_shared_from_this<Service> {
    Service(Session opened, const Limits& given)
        : session(std::move(opened)), limits(limits_for(*session.opened_, given)), budget(budget_of(*session.opened_, limits)),
          schedule(session.opened_->schedule(with_rows(limits, budget.max_rows), budget)), admission(limits) {}

    using Answers = std::map<std::int64_t, std::shared_ptr<RequestState>>;

    const pid_t process = ::getpid(); // whose thread this is
    const Session session;
    const Limits limits;
    const KvBudget budget;
    Schedule schedule; // used by the batcher's thread only
    std::atomic<Clock::rep> step_began{0};
    std::atomic<std::int64_t> numbers{0}; // of requests so far
    std::thread thread;

    std::mutex mutex; // guards the members below; never held while a step or a callback runs
    std::condition_variable changed;
    Answers answers;
    AdmissionQueue admission;
    std::deque<std::shared_ptr<RequestState>> arrivals; // not yet seen by the thread
    std::deque<std::shared_ptr<RequestState>> callers;  // ended answers with pending callbacks
    bool is_closed = false, is_stopped = false, has_ended = false;
    std::exception_ptr fault;

    // --- submitting ---

    bool is_forked() const { return ::getpid() != process; }

    /// Throws in a forked child, where no thread runs the steps, and the lock may be held forever.
    void check_process() const {
        if (is_forked()) throw SessionError("this batcher belongs to the process that was forked; make a new one");
    }

    /// Throws if the batcher takes no requests. The lock is held.
    void check_open() const {
        if (fault) throw SessionError("this batcher failed; make a new one");
        if (is_closed) throw SessionError("this batcher is closed; make a new one");
    }

    std::int64_t num_waiting() const {
        return admission.num_admitting + static_cast<std::int64_t>(arrivals.size()) + schedule.num_waiting();
    }

    std::optional<Overloaded> refusal(const Client& client) const { return admission.refusal(client, schedule.num_rows(), num_waiting()); }

    /// Wait for a place and take it. Throws if there is none.
    void admit(const Client& client, Clock::time_point last) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait_until(lock, last, [&] { return fault || is_closed || !refusal(client); });
        if (fault || is_closed) ++admission.counts.refused;
        check_open();
        if (const auto full = refusal(client)) {
            ++admission.counts.overloaded;
            throw Overloaded(*full);
        }
        admission.admit(client);
    }

    /// Give back a place whose request was not accepted.
    void release(const Client& client) {
        const std::lock_guard<std::mutex> lock(mutex);
        admission.release(client);
        changed.notify_all();
    }

    std::shared_ptr<RequestState> new_answer(const Prompt& prompt, const GenerationConfig& config, const Entry& entry,
                                             Clock::time_point began, std::optional<Clock::time_point> until) {
        limits.check(config);
        const auto& opened = session.opened_;
        NewSequence made = opened->new_sequence(numbers++, prompt, config, began, std::nullopt, limits.max_prompt_tokens);
        budget.check(*made.seq);
        made.seq->client = entry.client;
        auto end = [own = weak_from_this()](std::int64_t which, FinishReason reason) {
            if (const std::shared_ptr<Service> there = own.lock()) there->end(which, reason);
        };
        return std::make_shared<RequestState>(opened, std::move(made), std::move(end), until, entry.client, entry.on_event);
    }

    void start(const std::shared_ptr<RequestState>& answer) {
        const std::lock_guard<std::mutex> lock(mutex);
        check_open();
        arrivals.push_back(answer);
        answers.emplace(answer->seq->index, answer);
        admission.accept();
        changed.notify_all();
    }

    // --- ending ---

    /// A request's holder ends it.
    void end(std::int64_t number, FinishReason reason) {
        if (is_forked()) return;
        const std::lock_guard<std::mutex> lock(mutex);
        conclude(number, reason, nullptr);
    }

    /// End a request: count it, and remove its sequence before the next step. The lock is held.
    void conclude(std::int64_t number, FinishReason reason, const std::exception_ptr& error) noexcept {
        const auto at = answers.find(number);
        if (at == answers.end()) return;
        const std::shared_ptr<RequestState> answer = std::move(at->second);
        answers.erase(at);
        if (reason == FinishReason::deadline)
            answer->seq->expire();
        else
            answer->seq->cancel();
        const Completion& end = answer->conclude(reason, error);
        reason = end.finish_reason;
        const auto outcome = error                               ? &Counts::failed
                             : reason == FinishReason::cancelled ? &Counts::cancelled
                             : reason == FinishReason::deadline  ? &Counts::expired
                                                                 : &Counts::finished;
        admission.end(answer->client, outcome, end);
        callers.push_back(answer);
        changed.notify_all();
    }

    // --- the thread ---

    void run() {
        try {
            while (next()) step();
            while (!schedule.is_idle()) schedule.step(); // every sequence is over: frees the KV memory
        } catch (...) {                                  // a fault of the batcher: no request may wait forever
            const std::lock_guard<std::mutex> lock(mutex);
            fault = std::current_exception();
            step_began = 0;
            is_closed = is_stopped = true;
            while (!answers.empty()) conclude(answers.begin()->first, FinishReason::cancelled, fault);
        }
        call_back();
        const std::lock_guard<std::mutex> lock(mutex);
        has_ended = true;
        changed.notify_all();
    }

    /// Wait for work; false when the batcher stops.
    bool next() {
        call_back();
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return is_stopped || !arrivals.empty() || !callers.empty() || !schedule.is_idle(); });
        for (; !arrivals.empty(); arrivals.pop_front())
            schedule.add(std::shared_ptr<Sequence>(arrivals.front(), arrivals.front()->seq.get()));
        std::vector<std::int64_t> overdue;
        for (const auto& [number, answer] : answers)
            if (answer->is_overdue()) overdue.push_back(number);
        for (const std::int64_t number : overdue) conclude(number, FinishReason::deadline, nullptr);
        return !is_stopped;
    }

    void step() {
        if (schedule.is_idle()) return;
        std::exception_ptr lost;
        step_began = Clock::now().time_since_epoch().count();
        do { // at once: the first tokens of a prompt do not wait for the others' forward
            for (const Accepted& accepted : schedule.step()) {
                deliver(accepted);
                if (is_lost(accepted.error)) lost = accepted.error;
            }
        } while (!lost && schedule.is_in_step());
        step_began = 0;
        if (lost) std::rethrow_exception(lost);
        const std::lock_guard<std::mutex> lock(mutex);
        changed.notify_all(); // sequences may have started: there may be room for waiting requests
    }

    void deliver(const Accepted& accepted) {
        std::shared_ptr<RequestState> answer;
        {
            const std::lock_guard<std::mutex> lock(mutex);
            const auto at = answers.find(accepted.seq);
            if (at == answers.end()) return; // it was ended while the forward ran
            answer = at->second;
        }
        std::exception_ptr error = accepted.error;
        if (!error) {
            try {
                answer->deliver(accepted);
                answer->call();
            } catch (...) { // the text decoder or the callback failed, which concerns this answer only
                error = std::current_exception();
            }
        }
        if (!error && !accepted.finish_reason) return;
        const std::lock_guard<std::mutex> lock(mutex);
        conclude(accepted.seq, accepted.finish_reason.value_or(FinishReason::cancelled), error);
    }

    /// Tell callbacks about answers that ended outside a step.
    void call_back() {
        for (;;) {
            std::shared_ptr<RequestState> answer;
            {
                const std::lock_guard<std::mutex> lock(mutex);
                if (callers.empty()) return;
                answer = std::move(callers.front());
                callers.pop_front();
            }
            try {
                answer->call();
            } catch (...) { // it is over anyway
            }
        }
    }

    /// Close this batcher when the process exits, in the middle of a step, too.
    void close_at_exit() {
        static std::mutex& guard = *new std::mutex; // these two outlast every handler
        static auto& services = *new std::vector<std::weak_ptr<Service>>;
        // ONNX Runtime was loaded before, with the session, so this runs before its destructors.
        static const int registered = std::atexit([] {
            const std::lock_guard<std::mutex> lock(guard);
            for (const std::weak_ptr<Service>& service : services)
                if (const std::shared_ptr<Service> running = service.lock()) running->close(0.0, 10.0);
        });
        static_cast<void>(registered);
        const std::lock_guard<std::mutex> lock(guard);
        services.erase(std::remove_if(services.begin(), services.end(), [](const auto& service) { return service.expired(); }),
                       services.end());
        services.push_back(weak_from_this());
    }

    bool close(double drain, std::optional<double> timeout) {
        const Clock::duration rest = duration_of(drain, "drain"), patience = duration_of(timeout.value_or(forever), "timeout");
        if (is_forked()) return true;
        std::unique_lock<std::mutex> lock(mutex);
        const bool is_own = std::this_thread::get_id() == thread.get_id();
        is_closed = true;
        changed.notify_all();
        if (!is_own) changed.wait_for(lock, rest, [this] { return answers.empty() || is_stopped; });
        while (!answers.empty()) conclude(answers.begin()->first, FinishReason::cancelled, nullptr);
        is_stopped = true;
        changed.notify_all();
        if (is_own) return true;
        if (!changed.wait_for(lock, patience, [this] { return has_ended; })) return false;
        if (thread.joinable()) thread.join(); // the thread no longer needs the lock
        return true;
    }
};

Batcher::Batcher(Session session, const Limits& limits) : service_(std::make_shared<Service>(std::move(session), limits)) {
    service_->close_at_exit();
    try {
        service_->thread = std::thread([own = service_] { own->run(); });
    } catch (const std::system_error& error) {
        throw MemoryError(std::string("the batcher's thread cannot be started (") + error.what() + "); free memory, or allow more threads");
    }
}

Batcher::~Batcher() {
    service_->close(0.0, 10.0);
    if (service_->thread.joinable()) service_->thread.detach(); // it hangs in a step and keeps what it needs
}

Request Batcher::submit(const Prompt& prompt, const GenerationConfig& config, const Entry& entry) {
    const Clock::time_point began = Clock::now();
    std::optional<Clock::time_point> until;
    if (config.deadline && *config.deadline > 0)
        until = began + duration_of(*config.deadline, "deadline"); // other values are refused below
    const Clock::time_point last = began + duration_of(entry.wait.value_or(forever), "wait");
    service_->check_process();
    service_->admit(entry.client, until ? std::min(last, *until) : last);
    std::shared_ptr<RequestState> answer;
    try {
        answer = service_->new_answer(prompt, config, entry, began, until);
        service_->start(answer);
    } catch (...) {
        service_->release(entry.client);
        throw;
    }
    return Request(std::move(answer));
}

bool Batcher::alive() const {
    if (service_->is_forked()) return false;
    const std::lock_guard<std::mutex> lock(service_->mutex);
    return !service_->is_closed;
}

Counts Batcher::counts() const {
    const std::lock_guard<std::mutex> lock(service_->mutex);
    return service_->admission.counts;
}

std::int64_t Batcher::num_running() const { return service_->schedule.num_running(); }

std::int64_t Batcher::num_waiting() const {
    const std::lock_guard<std::mutex> lock(service_->mutex);
    return service_->num_waiting();
}

double Batcher::kv_usage() const {
    const auto most = static_cast<double>(std::max<std::int64_t>(1, service_->budget.num_entries()));
    return std::min(1.0, static_cast<double>(service_->schedule.num_entries()) / most);
}

double Batcher::step_seconds() const {
    const Clock::rep began = service_->step_began;
    return began == 0 ? 0.0 : since(Clock::time_point(Clock::duration(began)));
}

bool Batcher::close(double drain, std::optional<double> timeout) { return service_->close(drain, timeout); }
const Limits& Batcher::limits() const { return service_->limits; }

} // namespace mars
