// The handles of a sequence of calls, and checks for every call: the status must say whether there is an error and a
// handle.
#pragma once

#include "automata.hpp"
#include "c_api/handles.hpp"
#include "c_values.hpp"
#include "model.hpp"

/// A session of the bundle in MARS_FUZZ_BUNDLE; NULL if it is not set.
inline const mars_session* real_session() {
    static mars_session* session = [] {
        mars_session* opened = nullptr;
        const char* path = std::getenv("MARS_FUZZ_BUNDLE");
        if (path == nullptr) return opened;
        mars_session_options options;
        mars_session_options_init(&options, sizeof options);
        options.threads = 1;
        options.cache_bytes = 1 << 20;
        require(mars_session_open(path, &options, &opened, nullptr) == MARS_OK, "MARS_FUZZ_BUNDLE is a bundle");
        const std::int64_t positions[] = {1, 64};
        const double seconds[] = {0.001, 0.002};
        require(mars_session_set_cost(opened, positions, seconds, 2, nullptr) == MARS_OK, "costs can be given");
        return opened;
    }();
    return session;
}

constexpr std::size_t places = 3; // of each kind of handle

/// All handles of an input; destroyed with it.
class Handles : protected Values {
  public:
    Handles(Bytes given, const mars_session* lent) : Values(given), session_(lent) {
        if (lent != nullptr) return;
        own_ = new mars_session(mars::Opened::over(bundle(), std::make_unique<model::Backend>(), text(), 1 << 16));
        session_ = own_;
        const std::int64_t positions[] = {1, 64};
        const double seconds[] = {0.001, 0.002};
        require(mars_session_set_cost(session_, positions, seconds, 2, nullptr) == MARS_OK, "costs can be given");
    }

    ~Handles() {
        const bool late = given_.flag(); // requests may outlive their batcher, and all of them the session
        if (late) close_session();
        for (auto* each : batchers_)
            if (late) mars_batcher_free(each);
        for (auto* each : requests_) mars_request_free(each);
        for (auto* each : batchers_)
            if (!late) mars_batcher_free(each);
        for (auto* each : streams_) mars_stream_close(each);
        for (auto* each : talks_) mars_conversation_close(each);
        for (auto* each : completions_) mars_completion_free(each);
        close_session();
    }
    Handles(const Handles&) = delete;
    Handles& operator=(const Handles&) = delete;

  protected:
    static mars::Bundle bundle() {
        using automata::file;
        static const model::Directory directory;
        static const std::vector<std::string> files = {
            file({{false, {{'a', 'a', 1}}}, {false, {{'b', 'b', 2}}}, {true, {{'a', 'a', 1}, {'c', 'z', 2}}}}),
            file({{false, {{'"', '"', 1}}}, {false, {{' ', '!', 1}, {'"', '"', 2}, {'#', '~', 1}}}, {true, {}}}), file({{true, {}}}),
            "no automaton"};
        static const mars::Bundle all = model::bundle(directory.path, files);
        return all;
    }

    static const mars::Text& text() {
        static const mars::Text all = model::text();
        return all;
    }

    template <typename T>
    T*& place(T* (&all)[places]) {
        return all[given_.below(places)];
    }

    /// Receives a call's error, and checks it.
    mars_error** error() {
        error_ = nullptr;
        wants_error_ = given_.below(8) != 0;
        return wants_error_ ? &error_ : nullptr;
    }

    bool good(mars_status status) {
        require(status >= MARS_OK && status <= MARS_ERROR_OVERLOADED, "a status is one");
        if (status == MARS_ERROR_INTERNAL) std::fprintf(stderr, "%s\n", mars_error_message(error_));
        require(status != MARS_ERROR_INTERNAL, "no call finds a fault of the library's");
        if (wants_error_) {
            require((status == MARS_OK) == (error_ == nullptr), "there is an error, or none");
            require(mars_error_status(error_) == status, "the error's status is the call's");
            const char* message = mars_error_message(error_);
            require(is_text(message, std::strlen(message)) && (status == MARS_OK) == (*message == '\0'), "an error says what is wrong");
            require(mars_error_retry_after(error_) >= 0, "some time from now");
        }
        mars_error_free(error_);
        error_ = nullptr;
        return status == MARS_OK;
    }

    /// Store a handle; the previous one ends.
    template <typename T>
    void keep(T*& at, T* made, bool is_good, void (*end)(T*)) {
        require(is_good == (made != nullptr), "there is a handle where the call was good");
        if (made == nullptr) return;
        end(at);
        at = made;
    }

    void close_session() {
        mars_session_close(own_);
        if (own_ != nullptr) session_ = nullptr;
        own_ = nullptr;
    }

    mars_session* own_ = nullptr;
    const mars_session* session_;
    mars_error* error_ = nullptr;
    bool wants_error_ = false;
    mars_stream* streams_[places] = {};
    mars_conversation* talks_[places] = {};
    mars_stream* replies_[places] = {};
    mars_batcher* batchers_[places] = {};
    mars_request* requests_[places] = {};
    mars_completion* completions_[places] = {};
};
