// Fuzzes the example service's requests: any bytes, in pieces of any size, are read and understood, or refused with a
// valid HTTP status.
#include "../../../examples/cpp_service/http.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include "../../../examples/cpp_service/keys.hpp"
#include "../../../examples/cpp_service/openai.hpp"
#include "deep.hpp"
#include "fuzz.hpp"

namespace {

const std::atomic<bool> not_stopping{false};

/// Two ends of a connection that preserves the pieces.
struct Wire {
    Wire() { require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0, "there are sockets"); }
    ~Wire() {
        for (const int end : ends) close(end);
    }
    Wire(const Wire&) = delete;
    Wire& operator=(const Wire&) = delete;

    /// Send in pieces; the last ones are large enough for all of them to be in flight at once.
    void put(std::string_view data, std::size_t piece) const {
        for (int i = 0; !data.empty(); ++i) {
            const std::size_t size = std::min(i < 64 ? piece : 8192, data.size());
            if (send(ends[0], data.data(), size, MSG_NOSIGNAL) < 0) break;
            data.remove_prefix(size);
        }
        shutdown(ends[0], SHUT_WR);
    }

    /// Everything the service has written.
    std::string get() const {
        std::string all;
        char chunk[16384];
        shutdown(ends[1], SHUT_WR);
        for (ssize_t count = 0; (count = recv(ends[0], chunk, sizeof chunk, 0)) > 0;) all.append(chunk, static_cast<std::size_t>(count));
        return all;
    }

    int ends[2] = {-1, -1};
};

/// Parse a request as the service does before it runs anything. Returns the status.
int understood(const std::string& target, const std::string& body) {
    const std::string path = target.substr(0, target.find('?'));
    try {
        if (path == "/v1/chat/completions")
            openai::read_request(openai::Kind::chat, body, openai::Limits());
        else
            openai::read_request(openai::Kind::text, body, openai::Limits());
    } catch (const openai::Refused& refused) {
        require(refused.status >= 400 && refused.status <= 499, "a client's mistake has a client's status");
        const std::string text = openai::text_of(openai::error(refused.status, refused.what(), refused.param, refused.code_word));
        require(openai::Json::accept(text), "an error's body is JSON");
        return refused.status;
    }
    return 200;
}

/// Answer as the service would, in one piece or in chunks.
void answer(http::Exchange& exchange, int status, const std::string& text) {
    if (status != 200) return exchange.respond(status, text);
    exchange.begin("text/event-stream");
    exchange.send(text);
    exchange.end();
}

void serve(std::string_view input, std::size_t piece) {
    const Wire wire;
    const http::Limits limits;
    wire.put(input, piece);
    http::Exchange exchange(wire.ends[1], limits, not_stopping);
    int status = 0;
    try {
        exchange.read(-1);
        require(exchange.body.size() == exchange.head.body_bytes, "a body is as long as its head says");
        require(exchange.body.size() <= limits.body_bytes, "a body is no longer than the limit");
        static const Keys no_keys;
        require(!no_keys.find(exchange.head.authorization), "without keys no key is valid");
        status = understood(exchange.head.target, exchange.body);
        answer(exchange, status, "{\"text\": \"what it says\"}\n");
    } catch (const http::Refusal& refusal) {
        require(refusal.status >= 400 && refusal.status <= 499, "a refusal has a client's status");
        exchange.respond(refusal.status, refusal.what());
    }
    const std::string reply = wire.get();
    require(reply.rfind("HTTP/1.1 ", 0) == 0 && reply.find("\r\n\r\n") != std::string::npos, "there is an answer");
    if (status == 200) require(reply.find("{\"text\": \"what it says\"}\n") != std::string::npos, "and the text is in it");
}

std::string post(const std::string& path, const std::string& body, const std::string& headers = "") {
    return "POST " + path + " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + headers +
           "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

} // namespace

std::vector<std::string> seeds() {
    const std::string lines = [] {
        std::string text;
        for (int i = 0; i < 200; ++i) text += "a line of a long question, number " + std::to_string(i) + "\\n";
        return text;
    }();
    const std::string chat =
        R"({"model": "m:fast", "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "h\u00e9\ud83d\ude00"}]}], )"
        R"("stream": true, "stream_options": {"include_usage": true}, "temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "seed": 18446744073709551615, "n": 2, )"
        R"("stop": ["a", "b"], "max_tokens": 5, "max_completion_tokens": 7, "logprobs": false, "return_steps": true, "tools": [], "tool_choice": "auto", )"
        R"("repetition_penalty": 1.1, "top_k": 4, "masks": "auto", "user": "u", "logit_bias": {}, "response_format": {"type": "text"}})";
    const std::string tau_settings =
        R"({"messages": [{"role": "user", "content": "x"}], "tau": 0.5, "metric": "entropy", "masks": 7, "profile": "p", "exact": false})";
    const std::string texts = R"({"prompt": ["a", "b"], "echo": false, "best_of": 1, "suffix": null, "stop": "\n", "max_tokens": 3})";
    const std::string own =
        R"({"messages": [{"role": "user", "content": "hi"}], "stream": false, "exact": true, "masks": "full", "max_tokens": 20, "temperature": 0, "seed": 1, "stop": ["x"]})";
    const std::string ids = R"({"prompt": [[1, 2], [3, -4, 9223372036854775807]], "n": 3})";
    std::string headers = "Authorization: Bearer key\r\nExpect: 100-continue\r\nContent-Encoding: identity\r\n";
    for (int i = 0; i < 90; ++i) headers += "X-Header-" + std::to_string(i) + ": " + std::string(100, 'v') + "\r\n";
    std::string all_ids = "{\"prompt\": [1";
    for (int i = 0; i < 3000; ++i) all_ids += ", " + std::to_string(i);
    all_ids += "]}";
    const std::vector<std::string> requests = {
        post("/v1/chat/completions?x=1", chat),
        post("/v1/chat/completions", tau_settings),
        post("/v1/completions", texts),
        post("/v1/completions", ids),
        post("/v1/completions", all_ids),
        post("/v1/completions", R"({"prompt": "a", "temperature": 1e400, "n": -1})"),
        post("/v1/chat/completions", own, "Expect: 100-continue\r\n"),
        post("/v1/completions", "{\"prompt\": \"" + lines + "\", \"tau\": 0.5, \"masks\": 2}"),
        post("/v1/chat/completions", "{\"messages\": [{\"role\": \"user\", \"content\": \"" + lines + "\"}]}", headers),
        post("/v1/chat/completions", "{\"messages\": \x01\x02}"), // see deep.hpp
        post("/v1/completions", "{\"prompt\": \x01"),
        post("/v1/completions", "", "Content-Length: 5\r\n"),
        post("/v1/completions", "x", "Content-Encoding: gzip\r\n"),
        "POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        "POST /v1/completions HTTP/1.0\r\ncontent-length: 0002\r\n\r\n{}more",
        "GET /health HTTP/1.1\r\nRange: bytes=0-1,1-2\r\n\r\n",
        "GET  / HTTP/1.1\r\n: \r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET /" + std::string(17000, 'a') + " HTTP/1.1\r\n\r\n",
    };
    std::vector<std::string> made;
    for (const std::string& request : requests) made.push_back(std::string(1, made.size() % 3 == 1 ? '\x07' : '\0') + request);
    return made;
}

/// The first byte: size of the first pieces, 0 for one piece.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) return 0;
    const std::size_t piece = data[0] == 0 ? 8192 : data[0];
    const std::string input = deepened(data + 1, size - 1);
    serve(input, piece);
    // Also as a body that no head has cut short.
    for (const char* path : {"/v1/chat/completions", "/v1/completions"}) understood(path, input);
    return 0;
}
