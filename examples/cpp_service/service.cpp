// A small HTTP service on libmars: all clients are rows of one batch. It serves OpenAI's POST /v1/chat/completions and
// /v1/completions (complete or streamed by SSE) and GET /v1/models; GET /health shows its state. SIGINT and SIGTERM
// stop it: no new connections, and running answers get a little time and are then cut short and sent. An example, not
// a product: no TLS.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <iostream>
#include <mutex>
#include <pthread.h>
#include <random>
#include <thread>

#include <mars/batcher.hpp>
#include <mars/errors.hpp>

#include "http.hpp"
#include "keys.hpp"
#include "mailbox.hpp"
#include "openai.hpp"
#include "options.hpp"
#include "serializer.hpp"

namespace {

using openai::Json;

constexpr std::chrono::seconds request_timeout{600}; // longest time of an answer
constexpr std::chrono::milliseconds glance{50};      // how often a waiting client is checked
constexpr std::chrono::seconds silence{5};           // after which a stream sends a comment
constexpr const char* stopping_words = "the service is stopping";
constexpr const char* lost_words = "this process cannot use the GPU any more: restart it";

std::string line(const Json& value) { return openai::text_of(value) + "\n"; }

std::string event_line(const Json& value) { return "data: " + openai::text_of(value) + "\n\n"; }

std::string retry_after(double seconds) { return "Retry-After: " + std::to_string(std::max(1L, std::lround(seconds))) + "\r\n"; }

/// The model name that clients use: the bundle's directory without .bundle.
std::string name_of(std::filesystem::path path) {
    path = std::filesystem::weakly_canonical(path);
    return path.extension() == ".bundle" ? path.stem().string() : path.filename().string();
}

class Service {
  public:
    Service(mars::Session session, const Options& options)
        : session_(std::move(session)), name_(name_of(options.bundle)), grace_(options.grace),
          keys_(options.key_file ? Keys(*options.key_file) : Keys()), batcher_(session_, options.limits),
          server_(http::Limits{}, [this](http::Exchange& exchange) { handle(exchange); }) {}

    bool listen(const std::string& host, int port) {
        const int bound = server_.bind(host, port);
        if (bound < 0) return false;
        std::cout << "listening on http://" << host << ":" << bound << std::endl;
        server_.run();
        return true;
    }

    /// Accept no new connections, and end running answers after the time of grace.
    void stop() {
        server_.stop();
        batcher_.close(grace_, std::nullopt);
        server_.hurry();
    }

  private:
    void handle(http::Exchange& exchange) {
        const std::string path = exchange.head.target.substr(0, exchange.head.target.find('?'));
        const auto answer = [&](const std::string& method, const auto& body) {
            if (exchange.head.method != method) throw http::Refusal(405, "this path takes " + method);
            body();
        };
        try {
            if (path == "/health") return answer("GET", [&] { exchange.respond(is_lost_ ? 503 : 200, line(health())); });
            const std::optional<std::string> key = keys_.find(exchange.head.authorization);
            if (!keys_.is_open() && !key)
                return refuse(exchange, 401, "an API key is needed: send Authorization: Bearer KEY", "", "invalid_api_key",
                              "WWW-Authenticate: Bearer\r\n");
            if (path == "/v1/models")
                answer("GET", [&] { exchange.respond(200, line(openai::models(session_, name_, began_))); });
            else if (path == "/v1/chat/completions")
                answer("POST", [&] { complete(exchange, openai::Kind::chat, key.value_or(exchange.address)); });
            else if (path == "/v1/completions")
                answer("POST", [&] { complete(exchange, openai::Kind::text, key.value_or(exchange.address)); });
            else
                throw http::Refusal(404, "there are /v1/chat/completions, /v1/completions, /v1/models and /health");
        } catch (const openai::Refused& refused) {
            refuse(exchange, refused.status, refused.what(), refused.param, refused.code_word);
        } catch (const mars::Overloaded& full) {
            const std::string words = full.what();
            refuse(exchange, 429, words.substr(0, words.find(", or submit")), "", "overloaded", retry_after(full.retry_after));
        } catch (const std::exception& error) {
            if (dynamic_cast<const http::Refusal*>(&error) != nullptr) throw;
            const int status = status_of(error);
            refuse(exchange, status, batcher_.alive() ? error.what() : unavailable(), "", code_of(error),
                   status == 503 ? retry_after(1) : "");
        }
    }

    static void refuse(http::Exchange& exchange, int status, const std::string& message, const std::string& param = "",
                       const std::string& code = "", const std::string& headers = "") {
        exchange.respond(status, line(openai::error(status, message, param, code)), headers);
    }

    /// The code of an error, as Python's server sends it.
    const char* code_of(const std::exception& error) const {
        if (!batcher_.alive()) return is_lost_ ? "failed" : "closing";
        if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "out_of_memory";
        const auto* own = dynamic_cast<const mars::Error*>(&error);
        return own != nullptr ? own->code : "failed";
    }

    /// Why a batcher that has ended takes no requests.
    const char* unavailable() const { return is_lost_ ? lost_words : stopping_words; }

    /// The status for an error: the request's fault (400), too little memory or time now (503), or ours (500).
    int status_of(const std::exception& error) const {
        if (dynamic_cast<const mars::DeviceLost*>(&error) != nullptr && !is_lost_.exchange(true)) std::cerr << error.what() << std::endl;
        if (dynamic_cast<const mars::MemoryError*>(&error) != nullptr || dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return 503;
        if (!batcher_.alive()) return 503;
        if (dynamic_cast<const mars::DeviceError*>(&error) != nullptr) return 500;
        return dynamic_cast<const mars::SessionError*>(&error) != nullptr ? 400 : 500;
    }

    /// `tokens`: of answers that have ended.
    Json health() const {
        const mars::Counts counts = batcher_.counts();
        return {{"status", is_lost_ ? "failed" : "ok"},
                {"tokens", counts.tokens},
                {"running", batcher_.num_running()},
                {"waiting", batcher_.num_waiting()},
                {"refused", counts.overloaded}};
    }

    void complete(http::Exchange& exchange, openai::Kind kind, const std::string& client) {
        openai::ApiRequest api_request = openai::read_request(kind, exchange.body, ask_limits_);
        choose(api_request);
        api_request.config.max_new_tokens =
            api_request.max_tokens.value_or(std::min(session_.info().context_length, ask_limits_.new_tokens));
        api_request.config.deadline = static_cast<double>(request_timeout.count());
        if (api_request.config.temperature > 0 && !api_request.has_seed) api_request.config.seed = fresh() >> 1U;
        api_request.config = api_request.config.repeatable(api_request.has_masks, api_request.has_seed);
        openai::check(session_, api_request);
        openai::switch_thinking(session_, api_request);
        const auto box = std::make_shared<Mailbox>();
        openai::Serializer serializer(fresh_id(), api_request.model.value_or(name_), api_request);
        enter(serializer, api_request, box, client);
        if (api_request.stream)
            streamed(exchange, serializer, *box);
        else
            whole(exchange, serializer, *box);
    }

    /// Apply the model and profile that a request names.
    void choose(openai::ApiRequest& api_request) const {
        const std::string model = api_request.model.value_or(name_);
        const std::vector<std::string> profiles = session_.info().profiles;
        for (const std::string& each : profiles)
            if (model == name_ + ":" + each) {
                if (api_request.names_tau_setting || (api_request.profile && *api_request.profile != each))
                    throw openai::Refused(400, "the model's name has a profile; give no other setting beside it", "model");
                api_request.profile = each;
            }
        if (model != name_ && (!api_request.profile || model != name_ + ":" + *api_request.profile))
            throw openai::Refused(404, "no such model (GET /v1/models lists them)", "model", "model_not_found");
        if (!api_request.profile) return;
        try {
            api_request.config = api_request.config.with_profile(session_.config_of_profile(*api_request.profile));
        } catch (const mars::SessionError& problem) {
            throw openai::Refused(400, problem.what(), "profile", problem.code);
        }
    }

    /// Queue all answers of a request in the turns of `client`. If one finds no room, those already queued end.
    void enter(openai::Serializer& serializer, const openai::ApiRequest& api_request, const std::shared_ptr<Mailbox>& box,
               const std::string& client) {
        for (const mars::Prompt& prompt : api_request.prompts)
            for (std::int64_t i = 0; i < api_request.n; ++i) {
                mars::GenerationConfig own = api_request.config;
                const std::size_t index = serializer.choices.size();
                own.seed += index; // equal prompts get different samples
                try {
                    serializer.choices.push_back(
                        {static_cast<std::int64_t>(index), batcher_.submit(prompt, own, {0.0, client, Mailbox::slot(box, index)})});
                } catch (const mars::SessionError& problem) {
                    if (typeid(problem) != typeid(mars::SessionError) || !batcher_.alive()) throw;
                    throw openai::refusal(problem, api_request.kind);
                }
                openai::Choice& choice = serializer.choices.back();
                if (api_request.config.grammar.empty()) choice.thinking = session_.thinking_stream(prompt);
                if ((api_request.return_steps || choice.thinking) && session_.info().has_text) choice.steps.emplace(session_.text_stream());
            }
    }

    /// Pass each event to `body` until all answers are over. Cancels them if the client disconnects. Throws what made
    /// one fail.
    template <typename Body, typename Idle>
    static void follow(const http::Exchange& exchange, openai::Serializer& serializer, Mailbox& box, const Body& body, const Idle& idle) {
        auto heard = std::chrono::steady_clock::now();
        while (!serializer.is_over()) {
            if (auto next = box.take(glance)) {
                body(serializer.choices[next->first], next->second);
                heard = std::chrono::steady_clock::now();
            } else {
                for (openai::Choice& choice : serializer.choices)
                    if (!choice.reason && choice.request.failed()) choice.request.result(0.0);
                if (std::chrono::steady_clock::now() - heard > silence) {
                    idle();
                    heard = std::chrono::steady_clock::now();
                }
            }
            if (!exchange.is_gone()) continue;
            for (openai::Choice& choice : serializer.choices) choice.request.cancel();
        }
    }

    void whole(http::Exchange& exchange, openai::Serializer& serializer, Mailbox& box) const {
        follow(exchange, serializer, box, [&](openai::Choice& choice, const mars::Event& event) { serializer.push(choice, event); }, [] {});
        bool has_begun = false;
        for (const openai::Choice& choice : serializer.choices) has_begun = has_begun || !choice.request.completion().token_ids.empty();
        if (!has_begun && !batcher_.alive()) throw http::Refusal(503, unavailable());
        exchange.respond(200, line(serializer.body()));
    }

    void streamed(http::Exchange& exchange, openai::Serializer& serializer, Mailbox& box) const {
        exchange.begin("text/event-stream");
        for (const Json& chunk : serializer.opening()) exchange.send(event_line(chunk));
        const auto send = [&](openai::Choice& choice, const mars::Event& event) {
            for (const Json& chunk : serializer.chunks(choice, event)) exchange.send(event_line(chunk));
        };
        try { // a comment, so that a long prompt does not look like a dead connection
            follow(exchange, serializer, box, send, [&] { exchange.send(": reading\n\n"); });
        } catch (const std::exception& error) { // the head was sent already: the error is the last event
            exchange.send(event_line(openai::error(status_of(error), error.what(), "", code_of(error))));
        }
        exchange.send("data: [DONE]\n\n");
        exchange.end();
    }

    std::uint64_t fresh() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return random_();
    }

    std::string fresh_id() {
        std::string id;
        for (std::uint64_t bits = fresh(), i = 0; i < 16; ++i, bits >>= 4U) id += "0123456789abcdef"[bits & 15U];
        return id;
    }

    const mars::Session session_;
    const std::string name_;
    const double grace_;
    const Keys keys_;
    const openai::Limits ask_limits_;
    const std::int64_t began_ =
        std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
    mutable std::atomic<bool> is_lost_{false}; // after a GPU failed permanently; the process must be restarted
    std::mutex mutex_;
    std::mt19937_64 random_{std::random_device{}()};
    mars::Batcher batcher_;
    http::Server server_;
};

} // namespace

int main(int argc, char** argv) {
    Options options;
    try {
        options = options_of({argv + 1, argv + argc});
    } catch (const std::exception&) {
        std::cerr << usage;
        return 2;
    }
    // One thread waits for signals, so that stopping runs as ordinary code.
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    try {
        mars::Session::Options opening;
        opening.threads = options.threads;
        opening.device = options.device;
        opening.parse_special = options.parse_special;
        mars::Session session = mars::Session::open(options.bundle, opening);
        Service service(std::move(session), options);
        std::thread waiter([signals, &service] {
            int signal = 0;
            sigwait(&signals, &signal);
            service.stop();
        });
        const bool served = service.listen("127.0.0.1", options.port);
        const int reason = errno;
        pthread_kill(waiter.native_handle(), SIGTERM); // wake it, if no signal did
        waiter.join();
        if (served) return 0;
        std::cerr << "error: cannot listen on port " << options.port << ": " << std::strerror(reason) << "\n";
    } catch (const std::exception& error) {
        std::cerr << "error: " << error.what() << "\n";
    }
    return 1;
}
