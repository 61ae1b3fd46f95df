#include "session/answers.hpp"

#include <algorithm>
#include <cmath>

#include <mars/errors.hpp>

namespace mars {

std::chrono::steady_clock::duration duration_of(double seconds, const char* name) {
    if (std::isnan(seconds)) throw SessionError(std::string(name) + " must be a number of seconds, not nan");
    return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
        std::chrono::duration<double>(std::clamp(seconds, 0.0, forever)));
}

Event event_of(const Accepted& accepted, TextStream* text) {
    Event event{"", accepted.token_ids, accepted.confidences, accepted.finish_reason, 0, accepted.accepted_draft_tokens, accepted.forced};
    if (text != nullptr) event.text = accepted.finish_reason ? text->finish() : text->read();
    return event;
}

Answers::Answers(std::shared_ptr<const Opened> session, const std::vector<Prompt>& prompts, const std::vector<GenerationConfig>& configs,
                 std::int64_t cache_block, const std::optional<std::string>& system)
    : session_(std::move(session)) {
    const Clock::time_point began = Clock::now();
    if (configs.size() != prompts.size())
        throw SessionError(std::to_string(prompts.size()) + " prompts but " + std::to_string(configs.size()) + " configs");
    std::vector<Sequence*> seqs;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
        NewSequence request = session_->new_sequence(static_cast<std::int64_t>(i), prompts[i], configs[i], began, system);
        seqs.push_back(request.seq.get());
        std::optional<Clock::time_point> until;
        if (const auto seconds = configs[i].deadline) until = began + duration_of(*seconds, "deadline");
        answers_.push_back({std::move(request.text), std::move(request.seq), until, {}});
    }
    Limits limits;
    limits.max_rows = std::max<std::int64_t>(1, static_cast<std::int64_t>(seqs.size()));
    limits.prefill_tokens = session_->prefill_tokens;
    limits.cache_block = cache_block;
    limits.check();
    run_.emplace(std::unique_ptr<Schedule>(new Schedule(session_->schedule(limits))), seqs);
}

std::optional<std::vector<Event>> Answers::next() {
    if (!run_) return std::nullopt;
    for (const Answer& answer : answers_)
        if (answer.until && Clock::now() >= *answer.until) answer.seq->expire();
    // A loop that failed or is done is never used again; its KV memory is freed now.
    std::optional<Run> run = std::exchange(run_, std::nullopt);
    failed_ = true; // until this step succeeds
    std::optional<std::vector<Accepted>> accepted = run->next();
    failed_ = false;
    if (!accepted) return std::nullopt;
    std::vector<Event> events;
    for (const Accepted& each : *accepted) {
        Answer& answer = answers_[static_cast<std::size_t>(each.seq)];
        answer.confidences.insert(answer.confidences.end(), each.confidences.begin(), each.confidences.end());
        events.push_back(event_of(each, answer.text.get()));
        events.back().row = each.seq;
    }
    run_ = std::move(run);
    return events;
}

Completion Answers::completion(std::size_t i) const {
    const Answer& answer = answers_[i];
    const Sequence& own = *answer.seq;
    Completion done;
    if (answer.text) {
        if (own.finish_reason) answer.text->finish();
        done.text = answer.text->text();
    }
    done.token_ids.assign(own.tokens.begin() + own.stats.prompt_tokens, own.tokens.end());
    done.confidences = answer.confidences;
    done.finish_reason = own.finish_reason.value_or(FinishReason::cancelled);
    done.stats = own.stats;
    return done;
}

std::vector<Completion> Answers::completions() const {
    std::vector<Completion> done;
    for (std::size_t i = 0; i < answers_.size(); ++i) done.push_back(completion(i));
    return done;
}

std::optional<Event> Stream::next() {
    std::optional<std::vector<Event>> events = answers_->next();
    if (!events) return std::nullopt;
    return events->empty() ? Event{} : std::move(events->front());
}

std::optional<double> Stream::tau() const { return answers_->seq(0).tau(); }
void Stream::set_tau(double tau) { answers_->seq(0).set_tau(tau); }
void Stream::set_exact(bool exact) { answers_->seq(0).set_exact(exact); }
void Stream::cancel() { answers_->cancel(0); }

void Stream::close() {
    cancel();
    while (answers_->next()) {
    }
}

bool Stream::is_over() const { return failed() || answers_->seq(0).finish_reason.has_value(); }
bool Stream::failed() const { return answers_->failed(); }
const Stats& Stream::stats() const { return answers_->seq(0).stats; }
Completion Stream::completion() const { return answers_->completion(0); }

} // namespace mars
