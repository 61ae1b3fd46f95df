#include "session/answers.hpp"

#include <algorithm>
#include <chrono>

#include <mars/errors.hpp>

#include "decode/blocks.hpp"

namespace mars {

Answers::Answers(std::shared_ptr<const Opened> session, const std::vector<Prompt>& prompts, const std::vector<GenerationConfig>& configs,
                 const Commit& commit, const std::optional<std::string>& system)
    : session_(std::move(session)) {
    const Clock::time_point began = Clock::now();
    if (configs.size() != prompts.size())
        throw SessionError(std::to_string(prompts.size()) + " prompts but " + std::to_string(configs.size()) + " configs");
    if (commit.cache_block < 1) throw SessionError("cache_block must be 1 or more, not " + std::to_string(commit.cache_block));
    const Manifest& manifest = session_->bundle.manifest;
    std::vector<Sequence*> seqs;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
        NewSequence request = session_->new_sequence(static_cast<std::int64_t>(i), prompts[i], configs[i], began, system);
        if (!configs[i].grammar.empty() && commit.kind == Commit::Kind::block)
            throw SessionError("a grammar needs cursor commit; leave block commit out");
        seqs.push_back(request.seq.get());
        std::optional<Clock::time_point> until;
        if (const auto seconds = configs[i].deadline)
            until = began + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(*seconds, 1e9)));
        answers_.push_back({std::move(request.text), std::move(request.seq), until, {}});
    }
    Backend& backend = *session_->backend;
    const std::int64_t block = manifest.block, mask = manifest.mask_id();
    if (commit.kind == Commit::Kind::block) {
        run_ = decode_blocks(backend, seqs, block, mask, commit.cache_block);
        return;
    }
    run_ = decode(backend, seqs, block, mask, session_->planner());
}

std::optional<std::vector<Event>> Answers::next() {
    if (!run_) return std::nullopt;
    for (const Answer& answer : answers_)
        if (answer.until && Clock::now() >= *answer.until) answer.seq->expire();
    // A loop that failed or is done is never used again; its KV memory is freed now.
    std::unique_ptr<Run> run = std::move(run_);
    failed_ = true; // until this step succeeds
    std::optional<std::vector<Accepted>> accepted = run->next();
    failed_ = false;
    if (!accepted) return std::nullopt;
    std::vector<Event> events;
    for (Accepted& each : *accepted) events.push_back(event(std::move(each)));
    run_ = std::move(run);
    return events;
}

Event Answers::event(Accepted accepted) {
    Answer& answer = answers_[static_cast<std::size_t>(accepted.seq)];
    answer.confidences.insert(answer.confidences.end(), accepted.confidences.begin(), accepted.confidences.end());
    std::string text;
    if (answer.text) text = accepted.finish_reason ? answer.text->finish() : answer.text->read();
    return {std::move(text), std::move(accepted.token_ids),  std::move(accepted.confidences), accepted.finish_reason,
            accepted.seq,    accepted.accepted_draft_tokens, std::move(accepted.forced)};
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

Stream::Stream(std::unique_ptr<Answers> answers) : answers_(std::move(answers)) {}
Stream::~Stream() = default;
Stream::Stream(Stream&&) noexcept = default;
Stream& Stream::operator=(Stream&&) noexcept = default;

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
