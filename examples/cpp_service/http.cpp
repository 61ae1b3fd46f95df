#include "http.hpp"

#include <algorithm>
#include <arpa/inet.h>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <map>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <system_error>
#include <thread>
#include <unistd.h>

namespace http {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds hurried{1};       // for each part of an answer once the server is stopping
constexpr std::size_t drained_bytes = 8U << 20U; // of a refused request, read so that the client receives the answer

/// The client's address; empty if it has disconnected.
std::string address_of(int socket) {
    sockaddr_in address{};
    socklen_t size = sizeof address;
    char text[INET_ADDRSTRLEN] = "";
    if (getpeername(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0) inet_ntop(AF_INET, &address.sin_addr, text, sizeof text);
    return text;
}

const char* reason(int status) {
    static const std::map<int, const char*> reasons{{200, "OK"},
                                                    {401, "Unauthorized"},
                                                    {404, "Not Found"},
                                                    {405, "Method Not Allowed"},
                                                    {408, "Request Timeout"},
                                                    {411, "Length Required"},
                                                    {413, "Content Too Large"},
                                                    {415, "Unsupported Media Type"},
                                                    {429, "Too Many Requests"},
                                                    {431, "Request Header Fields Too Large"},
                                                    {503, "Service Unavailable"}};
    const auto known = reasons.find(status);
    return known != reasons.end() ? known->second : status < 500 ? "Bad Request" : "Internal Server Error";
}

/// An error in OpenAI's form. `message` contains no quotes.
std::string error_body(int status, const std::string& message) {
    const char* type = status == 503   ? "service_unavailable_error"
                       : status == 404 ? "not_found_error"
                       : status < 500  ? "invalid_request_error"
                                       : "server_error";
    return "{\"error\": {\"message\": \"" + message + "\", \"type\": \"" + type + "\", \"param\": null, \"code\": null}}\n";
}

std::string lower(std::string_view text) {
    std::string made(text);
    std::transform(made.begin(), made.end(), made.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return made;
}

std::string_view trimmed(std::string_view text) {
    const std::size_t first = text.find_first_not_of(" \t");
    if (first == std::string_view::npos) return {};
    return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

std::string_view cut(std::string_view& text, std::string_view at) {
    const std::size_t end = std::min(text.find(at), text.size());
    const std::string_view part = text.substr(0, end);
    text.remove_prefix(std::min(end + at.size(), text.size()));
    return part;
}

std::size_t length_of(std::string_view text, std::size_t most) {
    if (text.empty() || text.find_first_not_of("0123456789") != std::string_view::npos)
        throw Refusal(400, "Content-Length is not a number");
    text.remove_prefix(std::min(text.find_first_not_of('0'), text.size()));
    const bool is_long = text.size() > 15;
    if (is_long || (!text.empty() && std::stoull(std::string(text)) > most))
        throw Refusal(413, "the body is larger than " + std::to_string(most) + " bytes");
    return text.empty() ? 0 : std::stoull(std::string(text));
}

int milliseconds_until(Clock::time_point deadline) {
    return std::max(0, static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count()));
}

} // namespace

Head parse_head(std::string_view text, const Limits& limits) {
    Head head;
    std::string_view line = cut(text, "\r\n");
    head.method = cut(line, " ");
    head.target = cut(line, " ");
    if (head.method.empty() || head.target.empty() || head.target.front() != '/' || (line != "HTTP/1.1" && line != "HTTP/1.0"))
        throw Refusal(400, "this is not HTTP/1.1");
    head.is_old = line == "HTTP/1.0";
    bool has_length = false;
    for (std::size_t count = 0; !text.empty(); ++count) {
        if (count == limits.headers) throw Refusal(431, "more than " + std::to_string(limits.headers) + " headers");
        std::string_view value = cut(text, "\r\n");
        const std::string name = lower(cut(value, ":"));
        if (name.empty() || name.find_first_of(" \t") != std::string::npos) throw Refusal(400, "a header without a name");
        value = trimmed(value);
        if (name == "authorization") head.authorization = value;
        if (name == "transfer-encoding") throw Refusal(411, "send the body whole, with its Content-Length");
        if (name == "content-encoding" && lower(value) != "identity") throw Refusal(415, "send the body as it is, not compressed");
        if (name == "expect") head.waits = lower(value) == "100-continue";
        if (name != "content-length") continue;
        if (has_length) throw Refusal(400, "two Content-Lengths");
        has_length = true;
        head.body_bytes = length_of(value, limits.body_bytes);
    }
    return head;
}

/// Receive at most `most` bytes. False if the client disconnects, the deadline passes, or the service stops.
bool Exchange::receive(std::string& data, std::size_t most, Clock::time_point deadline, int wake) const {
    char chunk[16384];
    for (;;) {
        pollfd waiting[] = {{socket_, POLLIN, 0}, {wake, POLLIN, 0}};
        const int ready = poll(waiting, 2, milliseconds_until(deadline));
        if (ready < 0 && errno == EINTR) continue;
        if (ready <= 0 || waiting[1].revents != 0) return false;
        const ssize_t count = recv(socket_, chunk, std::min(most, sizeof chunk), 0);
        if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (count > 0) data.append(chunk, static_cast<std::size_t>(count));
        return count > 0;
    }
}

void Exchange::read(int wake) {
    const Clock::time_point deadline = Clock::now() + limits_.read;
    std::string data;
    std::size_t end = std::string::npos;
    while (end == std::string::npos) {
        const std::size_t seen = data.size();
        if (seen >= limits_.head_bytes) throw Refusal(431, "the headers are larger than " + std::to_string(limits_.head_bytes) + " bytes");
        if (!receive(data, limits_.head_bytes - seen, deadline, wake)) throw Refusal(408, "the request did not come in time");
        end = data.find("\r\n\r\n", std::max<std::size_t>(seen, 3) - 3);
    }
    head = parse_head(std::string_view(data).substr(0, end), limits_);
    body = data.substr(end + 4);
    if (head.waits && body.empty()) write("HTTP/1.1 100 Continue\r\n\r\n");
    while (body.size() < head.body_bytes)
        if (!receive(body, head.body_bytes - body.size(), deadline, wake)) throw Refusal(408, "the request did not come in time");
    body.resize(head.body_bytes);
}

void Exchange::write(std::string_view data) {
    const Clock::time_point began = Clock::now();
    while (!data.empty() && !is_broken_) {
        const ssize_t count = ::send(socket_, data.data(), data.size(), MSG_NOSIGNAL);
        if (count > 0) {
            data.remove_prefix(static_cast<std::size_t>(count));
            continue;
        }
        if (count < 0 && errno == EINTR) continue;
        is_broken_ = (errno != EAGAIN && errno != EWOULDBLOCK) || Clock::now() - began > (stopping_ ? hurried : limits_.send);
        pollfd waiting{socket_, POLLOUT, 0};
        if (!is_broken_) poll(&waiting, 1, 100);
    }
}

void Exchange::respond(int status, const std::string& text, const std::string& headers) {
    write("HTTP/1.1 " + std::to_string(status) + " " + reason(status) + "\r\nContent-Type: application/json\r\nContent-Length: " +
          std::to_string(text.size()) + "\r\nConnection: close\r\n" + headers + "\r\n" + text);
}

void Exchange::begin(const std::string& type) {
    write("HTTP/1.1 200 OK\r\nContent-Type: " + type + "\r\nConnection: close\r\n" +
          (head.is_old ? "\r\n" : "Transfer-Encoding: chunked\r\n\r\n"));
}

void Exchange::send(const std::string& text) {
    if (text.empty()) return;
    char size[32];
    std::snprintf(size, sizeof size, "%zx\r\n", text.size());
    write(head.is_old ? text : size + text + "\r\n");
}

void Exchange::end() {
    if (!head.is_old) write("0\r\n\r\n");
}

bool Exchange::is_gone() const {
    pollfd state{socket_, POLLRDHUP, 0};
    return is_broken_ || poll(&state, 1, 0) > 0;
}

/// Closing the socket while the client still sends would discard the answer.
void Exchange::drain(std::chrono::milliseconds patience) const {
    shutdown(socket_, SHUT_WR);
    std::string data;
    const Clock::time_point deadline = Clock::now() + patience;
    for (std::size_t total = 0; total < drained_bytes && receive(data, drained_bytes, deadline, -1); data.clear()) total += data.size();
}

Server::Server(const Limits& limits, Handler handle) : limits_(limits), handle_(std::move(handle)) {
    if (pipe2(wake_, O_CLOEXEC | O_NONBLOCK) != 0) throw std::runtime_error("no pipe can be opened");
}

Server::~Server() {
    for (const int end : {listener_, wake_[0], wake_[1]})
        if (end >= 0) close(end);
}

int Server::bind(const std::string& host, int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    socklen_t size = sizeof address;
    auto* where = reinterpret_cast<sockaddr*>(&address);
    const int on = 1;
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    errno = EINVAL; // for a port out of range
    const bool good = port >= 0 && port < 65536 && inet_pton(AF_INET, host.c_str(), &address.sin_addr) == 1 &&
                      ::bind(listener_, where, size) == 0 && ::listen(listener_, SOMAXCONN) == 0 &&
                      getsockname(listener_, where, &size) == 0;
    return good ? ntohs(address.sin_port) : -1;
}

void Server::run() {
    while (!stopping_) {
        pollfd waiting[] = {{listener_, POLLIN, 0}, {wake_[0], POLLIN, 0}};
        if (poll(waiting, 2, -1) > 0 && waiting[0].revents != 0 && !stopping_) accept_one();
    }
    // Answer clients that have connected already: the service is stopping.
    for (std::size_t i = 0; i < limits_.connections && accept_one(); ++i) {
    }
    close(listener_);
    listener_ = -1;
    std::unique_lock<std::mutex> lock(mutex_);
    closed_.wait(lock, [this] { return open_.empty(); });
}

void Server::stop() {
    stopping_ = true;
    [[maybe_unused]] const ssize_t written = ::write(wake_[1], "x", 1);
}

bool Server::accept_one() {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        return false;
    }
    const int on = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (open_.size() >= limits_.connections) { // the connection that has been silent longest makes room
        const auto slowest = std::find_if(open_.begin(), open_.end(), [](const Open& each) { return each.is_reading; });
        if (slowest == open_.end() || open_.size() >= 2 * limits_.connections) {
            Exchange(socket, limits_, hurrying_).respond(503, error_body(503, "too many connections"), "Retry-After: 1\r\n");
            close(socket);
            return true;
        }
        slowest->is_reading = false;
        shutdown(slowest->socket, SHUT_RD);
    }
    const auto open = open_.insert(open_.end(), {socket, true});
    try {
        std::thread([this, open] { serve(open); }).detach();
    } catch (const std::system_error&) { // no thread can be created
        close(socket);
        open_.erase(open);
    }
    return true;
}

void Server::serve(std::list<Open>::iterator open) {
    Exchange exchange(open->socket, limits_, hurrying_);
    exchange.address = address_of(open->socket);
    const auto refuse = [&](int status, const std::string& message) {
        exchange.respond(status, error_body(status, message), status == 503 ? "Retry-After: 1\r\n" : "");
        exchange.drain(std::chrono::milliseconds(stopping_ ? 100 : 1000));
    };
    try {
        exchange.read(wake_[0]);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            open->is_reading = false;
        }
        handle_(exchange);
    } catch (const Refusal& error) {
        if (stopping_)
            refuse(503, "the service is stopping");
        else
            refuse(error.status, error.what());
    } catch (const std::exception&) {
        refuse(500, "the service failed");
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    close(open->socket);
    open_.erase(open);
    closed_.notify_all(); // under the lock, because the server may be destroyed right after
}

} // namespace http
