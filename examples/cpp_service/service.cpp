// A small HTTP service on libmars: POST /generate exact or with a tau of its own for each request, GET /health. SIGINT and SIGTERM end it
// gracefully: no new connections, running answers are cut short and sent. An example, not a product: no TLS, no authentication.
#include <atomic>
#include <csignal>
#include <iostream>
#include <pthread.h>
#include <thread>

#include <nlohmann/json.hpp>

#include <mars/session.hpp>

#include "http.hpp"
#include "places.hpp"
#include "request.hpp"

namespace {

using Json = nlohmann::json;

std::string line(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"; }

class Service {
  public:
    explicit Service(mars::Session session)
        : session_(std::move(session)), server_(http::Limits{}, [this](http::Exchange& exchange) { handle(exchange); }) {}

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
        const auto& [method, target] = std::tie(exchange.head.method, exchange.head.target);
        if (target != "/health" && target != "/generate") throw http::Refusal(404, "there are /health and /generate");
        if (method != (target == "/health" ? "GET" : "POST")) throw http::Refusal(405, "GET /health, POST /generate");
        if (target == "/health") return exchange.respond(200, line({{"tokens", tokens_.load()}}));
        try {
            generate(exchange);
        } catch (const BadRequest& error) {
            exchange.respond(400, line({{"error", error.what()}}));
        } catch (const mars::SessionError& error) {
            exchange.respond(400, line({{"error", error.what()}}));
        } catch (const mars::Error& error) {
            exchange.respond(500, line({{"error", error.what()}}));
        }
    }

    void generate(http::Exchange& exchange) {
        const Request request = parse_request(exchange.body, limits_);
        const Places::Place place = places_.take([&] { return !stopping_ && !exchange.is_gone(); });
        if (!place) throw http::Refusal(503, "busy; come back");
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
            last = line({{"error", error.what()}});
        }
        if (!request.stream) return exchange.respond(200, last);
        exchange.send(last);
        exchange.end();
    }

    static Json summary(const mars::Stream& stream) {
        const mars::Completion done = stream.completion();
        return {{"text", done.text},
                {"finish_reason", to_string(done.finish_reason)},
                {"tokens", done.stats.tokens},
                {"forwards", done.stats.forwards},
                {"tokens_per_forward", done.stats.tokens_per_forward()},
                {"proposed", done.stats.proposed},
                {"verified", done.stats.verified},
                {"rejected", done.stats.rejected()},
                {"queue_time", done.stats.queue_time}};
    }

    mars::Session session_;
    const Limits limits_;
    std::atomic<bool> stopping_{false};
    std::atomic<std::uint64_t> tokens_{0}; // generated so far, of all answers
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
        Service service(mars::Session::open(argv[1], options));
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
