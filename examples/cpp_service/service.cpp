// A small HTTP service on libmars. OpenAI's paths: POST /v1/chat/completions (whole, or streamed by SSE), GET /v1/models, and a running stream
// is steered by POST /v1/mars/streams/ID. Beside them POST /generate, which is simpler, and GET /health. SIGINT and SIGTERM end it gracefully:
// no new connections, running answers are cut short and sent. An example, not a product: no TLS, no authentication.
#include <algorithm>
#include <atomic>
#include <csignal>
#include <iostream>
#include <map>
#include <mutex>
#include <pthread.h>
#include <random>
#include <thread>

#include <mars/errors.hpp>
#include <mars/session.hpp>

#include "http.hpp"
#include "openai.hpp"
#include "places.hpp"
#include "request.hpp"

namespace {

using openai::Json;

constexpr std::chrono::seconds request_timeout{600}; // an answer ends with what it has then

std::string line(const Json& value) { return openai::text_of(value) + "\n"; }

std::string event_line(const Json& value) { return "data: " + openai::text_of(value) + "\n\n"; }

/// The name that clients use: the bundle's folder, without .bundle behind it.
std::string name_of(std::filesystem::path path) {
    path = std::filesystem::weakly_canonical(path);
    return path.extension() == ".bundle" ? path.stem().string() : path.filename().string();
}

/// Streams that run, by their ids, for those who steer them.
class Running {
  public:
    class Entry {
      public:
        Entry(Running& of, const openai::Reply& reply, mars::Stream& stream) : of_(of), id_(reply.id) {
            const std::lock_guard<std::mutex> lock(of_.mutex_);
            of_.streams_[id_] = {&reply, &stream};
        }
        Entry(const Entry&) = delete;
        Entry& operator=(const Entry&) = delete;
        ~Entry() {
            const std::lock_guard<std::mutex> lock(of_.mutex_);
            of_.streams_.erase(id_);
        }

      private:
        Running& of_;
        std::string id_;
    };

    /// Another tau, or exact mode for none, from the next step on; what holds then. Throws Refused.
    Json steer(const std::string& id, std::optional<double> tau) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto at = streams_.find(id);
        if (at == streams_.end()) throw openai::Refused(404, "no such stream is running", "id", "stream_not_found");
        const auto& [reply, stream] = at->second;
        try {
            if (tau)
                stream->set_tau(*tau);
            else
                stream->set_exact(true);
        } catch (const mars::SessionError& problem) {
            throw openai::Refused(400, problem.what(), "tau");
        }
        return {{"id", id}, {"mars", reply->settings(tau)}};
    }

  private:
    std::mutex mutex_;
    std::map<std::string, std::pair<const openai::Reply*, mars::Stream*>> streams_;
};

class Service {
  public:
    Service(mars::Session session, std::string name)
        : session_(std::move(session)), name_(std::move(name)),
          server_(http::Limits{}, [this](http::Exchange& exchange) { handle(exchange); }) {}

    bool listen(const std::string& host, int port) {
        const int bound = server_.bind(host, port);
        if (bound < 0) return false;
        std::cout << "listening on http://" << host << ":" << bound << std::endl;
        server_.run();
        return true;
    }

    void stop() {
        stopping_ = true;
        server_.stop();
    }

  private:
    void handle(http::Exchange& exchange) {
        const std::string path = exchange.head.target.substr(0, exchange.head.target.find('?'));
        const std::string steered = "/v1/mars/streams/";
        const auto answer = [&](const std::string& method, const auto& body) {
            if (exchange.head.method != method) throw http::Refusal(405, "this path takes " + method);
            body();
        };
        try {
            if (path == "/health")
                answer("GET", [&] { exchange.respond(200, line({{"status", "ok"}, {"tokens", tokens_.load()}})); });
            else if (path == "/v1/models")
                answer("GET", [&] { exchange.respond(200, line(openai::models(session_, name_, began_))); });
            else if (path == "/v1/chat/completions")
                answer("POST", [&] { chat(exchange); });
            else if (path.rfind(steered, 0) == 0)
                answer("POST", [&] {
                    exchange.respond(200, line(running_.steer(path.substr(steered.size()), openai::read_steer(exchange.body))));
                });
            else if (path == "/generate")
                answer("POST", [&] { generate(exchange); });
            else
                throw http::Refusal(404, "there are /v1/chat/completions, /v1/models, /generate and /health");
        } catch (const openai::Refused& refused) {
            exchange.respond(refused.status, line(openai::error(refused.status, refused.what(), refused.param, refused.code_word)));
        } catch (const BadRequest& error) {
            exchange.respond(400, line(openai::error(400, error.what())));
        } catch (const std::exception& error) {
            if (dynamic_cast<const http::Refusal*>(&error) != nullptr) throw;
            const int status = status_of(error);
            exchange.respond(status, line(openai::error(status, error.what())), status == 503 ? "Retry-After: 1\r\n" : "");
        }
    }

    /// Whose fault it is that there is no answer: the request's, that of what there is of memory now, or ours.
    static int status_of(const std::exception& error) {
        if (dynamic_cast<const mars::MemoryError*>(&error) != nullptr || dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return 503;
        if (dynamic_cast<const mars::DeviceError*>(&error) != nullptr) return 500;
        return dynamic_cast<const mars::SessionError*>(&error) != nullptr ? 400 : 500;
    }

    /// A place among those who compute. Throws Refusal where there is none.
    void with_place(http::Exchange& exchange, const std::function<void()>& body) {
        const Places::Place place = places_.take([&] { return !stopping_ && !exchange.is_gone(); });
        if (!place) throw http::Refusal(503, "busy; come back");
        body();
    }

    // --- /v1/chat/completions ---

    void chat(http::Exchange& exchange) {
        openai::Chat asked = openai::read_chat(exchange.body, chat_limits_);
        choose(asked);
        asked.config.max_new_tokens = asked.max_tokens.value_or(std::min(session_.max_capacity(), chat_limits_.new_tokens));
        asked.config.deadline = static_cast<double>(request_timeout.count());
        openai::check(session_, asked.config);
        with_place(exchange, [&] {
            openai::Reply reply("chatcmpl-" + fresh_id(), asked.model.value_or(name_), asked.profile, asked.config);
            mars::Stream stream = opened(asked);
            const Running::Entry entry(running_, reply, stream);
            if (asked.stream)
                streamed(exchange, asked, reply, stream);
            else
                whole(exchange, asked, reply, stream);
        });
    }

    /// The model and the profile that a request names, and what they set.
    void choose(openai::Chat& asked) const {
        const std::string model = asked.model.value_or(name_);
        const std::vector<std::string> profiles = session_.info().profiles;
        for (const std::string& each : profiles)
            if (model == name_ + ":" + each) {
                if (asked.names_knob || (asked.profile && *asked.profile != each))
                    throw openai::Refused(400, "the model's name has a profile; give no other setting beside it", "model");
                asked.profile = each;
            }
        if (model != name_ && (!asked.profile || model != name_ + ":" + *asked.profile))
            throw openai::Refused(404, "no such model (GET /v1/models lists them)", "model", "model_not_found");
        if (!asked.profile) return;
        try {
            const mars::GenerationConfig found = session_.config_of_profile(*asked.profile);
            asked.config.tau = found.tau;
            asked.config.metric = found.metric;
            asked.config.window = found.window;
        } catch (const mars::SessionError& problem) {
            throw openai::Refused(400, problem.what(), "profile");
        }
    }

    /// What is wrong with a request whose settings are good is its messages.
    mars::Stream opened(const openai::Chat& asked) const {
        try {
            return session_.stream(asked.messages, asked.config);
        } catch (const mars::DeviceError&) {
            throw;
        } catch (const mars::MemoryError&) {
            throw;
        } catch (const mars::SessionError& problem) {
            throw openai::Refused(400, problem.what(), "messages");
        }
    }

    void whole(http::Exchange& exchange, const openai::Chat& asked, const openai::Reply& reply, mars::Stream& stream) {
        openai::Steps steps(session_.text_stream());
        Json made = Json::array();
        std::int64_t verified = 0;
        while (const std::optional<mars::Event> event = stream.next()) {
            tokens_ += event->token_ids.size();
            const std::int64_t held = stream.stats().verified - std::exchange(verified, stream.stats().verified);
            if (asked.return_steps)
                for (Json& step : steps.push(*event, held)) made.push_back(std::move(step));
            if (stopping_ || exchange.is_gone()) stream.cancel();
        }
        Json body = reply.body(stream.completion(), stream.tau());
        if (asked.return_steps) body["choices"][0]["steps"] = std::move(made);
        exchange.respond(200, line(body));
    }

    void streamed(http::Exchange& exchange, const openai::Chat& asked, const openai::Reply& reply, mars::Stream& stream) {
        exchange.begin("text/event-stream");
        exchange.send(event_line(reply.chunk({{"role", "assistant"}, {"content", ""}})));
        openai::Steps steps(session_.text_stream());
        std::int64_t verified = 0;
        try {
            while (const std::optional<mars::Event> event = stream.next()) {
                tokens_ += event->token_ids.size();
                const std::int64_t held = stream.stats().verified - std::exchange(verified, stream.stats().verified);
                Json made = asked.return_steps ? steps.push(*event, held) : Json::array();
                if (!event->text.empty() || !made.empty()) {
                    Json chunk = reply.chunk(event->text.empty() ? Json::object() : Json{{"content", event->text}});
                    if (asked.return_steps) chunk["choices"][0]["steps"] = std::move(made);
                    exchange.send(event_line(chunk));
                } else if (!event->finish_reason) {
                    exchange.send(": reading\n\n"); // a comment, so that nobody takes a long prompt for a dead connection
                }
                if (stopping_ || exchange.is_gone()) stream.cancel();
            }
            const mars::Completion done = stream.completion();
            exchange.send(event_line(reply.last(done, stream.tau(), !asked.include_usage)));
            if (asked.include_usage) exchange.send(event_line(reply.usage(done, stream.tau())));
        } catch (const std::exception& error) { // the head is out: what went wrong is the last event
            exchange.send(event_line(openai::error(status_of(error), error.what())));
        }
        exchange.send("data: [DONE]\n\n");
        exchange.end();
    }

    std::string fresh_id() {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::string id;
        for (int i = 0; i < 24; ++i) id += "0123456789abcdef"[random_() % 16];
        return id;
    }

    // --- /generate ---

    void generate(http::Exchange& exchange) {
        Request request = parse_request(exchange.body, limits_);
        request.config.deadline = static_cast<double>(request_timeout.count());
        with_place(exchange, [&] {
            mars::Stream stream = session_.stream(request.prompt, request.config);
            if (request.stream) exchange.begin("application/x-ndjson");
            std::string last;
            try {
                while (const std::optional<mars::Event> event = stream.next()) {
                    tokens_ += event->token_ids.size();
                    if (request.stream) exchange.send(line({{"text", event->text}, {"tokens", event->token_ids.size()}}));
                    // The next step comes to nobody; what has come so far is sent.
                    if (stopping_ || exchange.is_gone()) stream.cancel();
                }
                last = line(summary(stream));
            } catch (const std::exception& error) {
                if (!request.stream) throw;
                last = line(openai::error(status_of(error), error.what()));
            }
            if (!request.stream) return exchange.respond(200, last);
            exchange.send(last);
            exchange.end();
        });
    }

    static Json summary(const mars::Stream& stream) {
        const mars::Completion done = stream.completion();
        return {{"text", done.text},
                {"finish_reason", to_string(done.finish_reason)},
                {"tokens", done.stats.tokens},
                {"cached_tokens", done.stats.cached_tokens},
                {"forwards", done.stats.forwards},
                {"tokens_per_forward", done.stats.tokens_per_forward()},
                {"proposed", done.stats.proposed},
                {"verified", done.stats.verified},
                {"rejected", done.stats.rejected()},
                {"queue_time", done.stats.queue_time}};
    }

    mars::Session session_;
    const std::string name_;
    const Limits limits_;
    const openai::Limits chat_limits_;
    const std::int64_t began_ =
        std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
    std::atomic<bool> stopping_{false};
    std::atomic<std::uint64_t> tokens_{0}; // generated so far, of all answers
    std::mutex mutex_;
    std::mt19937_64 random_{std::random_device{}()};
    Running running_;
    Places places_{8, 16, std::chrono::seconds(30)};
    http::Server server_;
};

} // namespace

int main(int argc, char** argv) {
    if (argc < 2 || argc > 4) {
        std::cerr << "usage: service BUNDLE [PORT [THREADS]]\n";
        return 2;
    }
    // Signals are taken by one thread that waits for them, so that stopping runs as ordinary code.
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    try {
        const int port = argc >= 3 ? std::stoi(argv[2]) : 8080;
        mars::Session::Options options;
        if (argc == 4) options.threads = std::stoi(argv[3]);
        mars::Session session = mars::Session::open(argv[1], options);
        for (const std::string& warning : session.warnings()) std::cerr << "warning: " << warning << "\n";
        Service service(std::move(session), name_of(argv[1]));
        std::thread waiter([signals, &service] {
            int signal = 0;
            sigwait(&signals, &signal);
            service.stop();
        });
        const bool served = service.listen("127.0.0.1", port);
        pthread_kill(waiter.native_handle(), SIGTERM); // wake it, if no signal did
        waiter.join();
        if (served) return 0;
        std::cerr << "error: cannot listen on port " << port << "\n";
    } catch (const std::exception& error) {
        std::cerr << "error: " << error.what() << "\n";
    }
    return 1;
}
