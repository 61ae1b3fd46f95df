// A small HTTP service on libmars: POST /generate with a tau of its own for each request, GET /health. SIGINT and SIGTERM end it
// gracefully: no new connections, running answers are cut short and sent. An example, not a product: no TLS, no authentication.
#include <atomic>
#include <csignal>
#include <iostream>
#include <memory>
#include <pthread.h>
#include <thread>

#include <httplib.h>
#include <nlohmann/json.hpp>

#include <mars/session.hpp>

#include "request.hpp"

namespace {

using Json = nlohmann::json;

std::string line(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"; }

void refuse(httplib::Response& response, int status, const std::string& message) {
    response.status = status;
    response.set_content(line({{"error", message}}), "application/json");
}

class Service {
  public:
    explicit Service(mars::Session session) : session_(std::move(session)) {
        server_.set_payload_max_length(limits_.body_bytes);
        server_.set_read_timeout(10);
        server_.set_write_timeout(10);
        server_.new_task_queue = [] { return new httplib::ThreadPool(8); }; // connections served at once; the others wait
        server_.Get("/health",
                    [](const httplib::Request&, httplib::Response& response) { response.set_content("{}\n", "application/json"); });
        server_.Post("/generate",
                     [this](const httplib::Request& request, httplib::Response& response) { generate(request.body, response); });
    }

    bool listen(const std::string& host, int port) {
        if (port == 0)
            port = server_.bind_to_any_port(host.c_str());
        else if (!server_.bind_to_port(host.c_str(), port))
            port = -1;
        if (port < 0) return false;
        std::cout << "listening on http://" << host << ":" << port << std::endl;
        return server_.listen_after_bind();
    }

    void stop() {
        stopping_ = true;
        server_.stop();
    }

  private:
    void generate(const std::string& body, httplib::Response& response) {
        try {
            Request request = parse_request(body, limits_);
            auto stream = std::make_shared<mars::Stream>(session_.stream(request.prompt, request.config));
            if (request.stream)
                return response.set_chunked_content_provider(
                    "application/x-ndjson", [this, stream](std::size_t, httplib::DataSink& sink) { return send_next(*stream, sink); });
            while (stream->next())
                if (stopping_) stream->cancel();
            response.set_content(line(summary(*stream)), "application/json");
        } catch (const BadRequest& error) {
            refuse(response, 400, error.what());
        } catch (const mars::SessionError& error) {
            refuse(response, 400, error.what());
        } catch (const std::exception& error) {
            refuse(response, 500, error.what());
        }
    }

    /// One line for each step, and a last one with the summary. A client that went away ends its answer.
    bool send_next(mars::Stream& stream, httplib::DataSink& sink) const {
        std::string text;
        bool done = false;
        try {
            if (stopping_) stream.cancel();
            const std::optional<mars::Event> event = stream.next();
            done = !event;
            text = done ? line(summary(stream)) : line({{"text", event->text}, {"tokens", event->token_ids.size()}});
        } catch (const std::exception& error) {
            done = true;
            text = line({{"error", error.what()}});
        }
        const bool sent = sink.write(text.data(), text.size());
        if (done) sink.done();
        return sent;
    }

    static Json summary(const mars::Stream& stream) {
        const mars::Completion done = stream.completion();
        return {{"text", done.text},
                {"finish_reason", to_string(done.finish_reason)},
                {"tokens", done.stats.tokens},
                {"forwards", done.stats.forwards},
                {"tokens_per_forward", done.stats.tokens_per_forward()}};
    }

    mars::Session session_;
    const Limits limits_;
    std::atomic<bool> stopping_{false};
    httplib::Server server_;
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
