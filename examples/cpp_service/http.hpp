// HTTP/1.1 for a small service: one request per connection, with a limit on every length and every wait.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>

namespace http {

struct Limits {
    std::size_t head_bytes = 16384, headers = 100, body_bytes = 1U << 20U;
    std::size_t connections = 256;           ///< open at once; beyond them the longest silent one is closed
    std::chrono::seconds read{10}, send{10}; ///< for a whole request, and for each part of an answer
};

/// The answer to a refused request.
struct Refusal : std::runtime_error {
    Refusal(int code, const std::string& message) : std::runtime_error(message), status(code) {}
    int status;
};

struct Head {
    std::string method, target, authorization;
    bool is_old = false; ///< HTTP/1.0, which has no chunks
    bool waits = false;  ///< whether it waits for "100 Continue" before it sends the body
    std::size_t body_bytes = 0;
};

/// Parse a head, from the request line to the last header, without the empty line. Throws Refusal.
Head parse_head(std::string_view text, const Limits& limits);

/// A request and its answer: call `respond` once, or `begin`, any number of `send`, and `end`.
class Exchange {
  public:
    /// `stopping`: whether the server has no more time.
    Exchange(int socket, const Limits& limits, const std::atomic<bool>& stopping) : limits_(limits), stopping_(stopping), socket_(socket) {}

    Head head;
    std::string body, address; ///< `address`: the client's, without its port

    /// Read the request, unless `wake` (-1 for none) becomes readable first. Throws Refusal.
    void read(int wake);

    void respond(int status, const std::string& text, const std::string& headers = "");
    void begin(const std::string& type);
    void send(const std::string& text);
    void end();

    /// Whether the client has closed the connection, or sending failed.
    bool is_gone() const;

  private:
    friend class Server;
    bool receive(std::string& data, std::size_t most, std::chrono::steady_clock::time_point deadline, int wake) const;
    void write(std::string_view data);
    void drain(std::chrono::milliseconds patience) const;

    const Limits& limits_;
    const std::atomic<bool>& stopping_;
    int socket_;
    bool is_broken_ = false;
};

/// Serves each connection on a thread. `handle` may throw Refusal; other exceptions become status 500.
class Server {
  public:
    using Handler = std::function<void(Exchange&)>;

    Server(const Limits& limits, Handler handle);
    ~Server();
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;

    /// Listen; returns the port (any free one for 0), or -1 on failure.
    int bind(const std::string& host, int port);

    /// Serve until `stop`, and until every exchange that had begun is over.
    void run();

    /// From any thread: accept no new connections, and stop waiting for requests.
    void stop();

    /// From any thread: drop clients that do not read their answers now.
    void hurry() { hurrying_ = true; }

  private:
    struct Open {
        int socket;
        bool is_reading;
    };
    bool accept_one();
    void serve(std::list<Open>::iterator open);

    const Limits limits_;
    const Handler handle_;
    int listener_ = -1, wake_[2] = {-1, -1}; // the pipe becomes readable, permanently, when the server stops
    std::atomic<bool> stopping_{false}, hurrying_{false};
    std::mutex mutex_;
    std::condition_variable closed_;
    std::list<Open> open_; // oldest first
};

} // namespace http
