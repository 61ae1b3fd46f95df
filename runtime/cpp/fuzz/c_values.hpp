// Arguments of C calls: possibly invalid strings, structs of other versions, lists, and NULL instead of each; and
// checks of the library's results.
#pragma once

#include <cmath>
#include <deque>

#include <mars/mars.h>

#include "fuzz.hpp"
#include "text/utf8.hpp"

/// A caller's struct of this, an older or a newer version.
template <typename T>
struct Struct {
    explicit Struct(Bytes& given, void (*init)(T*, std::size_t)) {
        std::size_t size = sizeof(T);
        if (given.below(8) == 0) size = 8 * given.below(sizeof bytes / 8 + 1);
        init(get(), size);
        if (given.below(32) == 0) bytes[sizeof bytes - 1] = given.byte(); // something that a newer one has
    }
    T* get() { return reinterpret_cast<T*>(bytes); }
    T* operator->() { return get(); }

    alignas(16) unsigned char bytes[sizeof(T) + 64] = {};
};

inline bool is_text(const char* text, std::size_t size) {
    require(text != nullptr && text[size] == '\0', "a text ends with a zero byte");
    return mars::utf8::is_valid({text, size});
}

inline void check_tokens(const std::int64_t* ids, const double* confidences, std::size_t num) {
    for (std::size_t i = 0; i < num; ++i) {
        require(ids[i] >= 0 && ids[i] < 1 << 24, "a token is one");
        require(std::isfinite(confidences[i]), "a confidence is a number");
    }
}

inline void check_event(const mars_event& event) {
    if (event.text != nullptr) require(is_text(event.text, event.text_size), "the text of an event is UTF-8");
    check_tokens(event.token_ids, event.confidences, event.num_tokens);
    require(event.finish_reason >= MARS_NOT_FINISHED && event.finish_reason <= MARS_FINISH_DEADLINE, "a reason is one");
}

/// What a callback checks.
struct Heard {
    int most;             // events, then the answer is stopped
    std::int64_t row = 0; // of the last one
};

inline int on_event(const mars_event* event, void* user) {
    check_event(*event);
    if (user == nullptr) return 0; // a struct whose size ends before `user`
    auto& heard = *static_cast<Heard*>(user);
    heard.row = event->row;
    return heard.most-- <= 0 ? 1 : 0;
}

inline void on_log(std::int32_t level, const char* line, void*) {
    require(level >= MARS_LOG_DEBUG && level <= MARS_LOG_ERROR && line != nullptr, "a line of the log has a level");
}

/// Owns everything made from an input.
class Values {
  public:
    explicit Values(Bytes given) : given_(given) {}

    std::int64_t signed_integer() { return given_.flag() ? given_.integer() : static_cast<std::int64_t>(given_.below(8)) - 4; }

    const char* string() {
        static constexpr const char* known[] = {"", "g0", "g1", "g2", "g3", "p", "h\xC3\xA9 ab  12", "\xFF\xC3", "<|e|>", "user", "<r>"};
        const std::size_t kind = given_.below(16);
        if (kind < std::size(known)) return known[kind];
        return kind == 15 ? nullptr : kept_.emplace_back(given_.text()).c_str();
    }

    const char* messages() {
        static constexpr const char* known[] = {R"([{"role": "user", "content": "hi"}])",
                                                R"([{"role": "system", "content": " be brief "}, {"role": "user", "content": "ab"}])",
                                                R"([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])",
                                                "[]",
                                                "{",
                                                "null"};
        const std::size_t kind = given_.below(8);
        return kind < std::size(known) ? known[kind] : string();
    }

    template <typename T>
    const T* list(std::size_t& size, T (*value)(Bytes&)) {
        size = given_.below(12);
        auto& made = lists_.emplace_back(size * sizeof(T) + 1);
        for (std::size_t i = 0; i < size; ++i) {
            const T each = value(given_);
            std::memcpy(made.data() + i * sizeof(T), &each, sizeof(T));
        }
        return given_.below(16) == 0 ? nullptr : reinterpret_cast<const T*>(made.data());
    }

    const std::int64_t* integers(std::size_t& size) {
        return list<std::int64_t>(size, [](Bytes& given) { return given.integer(); });
    }

    Struct<mars_config> config() {
        Struct<mars_config> made(given_, mars_config_init);
        for (std::size_t fields = given_.below(6); fields > 0; --fields) field(*made.get());
        made->max_new_tokens = std::min(made->max_new_tokens, std::int64_t{1} << (given_.flag() ? 40 : 4));
        return made;
    }

    void field(mars_config& config) {
        switch (given_.below(19)) {
        case 0:
        case 1:
            config.tau = given_.real();
            break;
        case 2:
            config.metric = static_cast<std::int32_t>(given_.below(5)) - 1;
            break;
        case 3:
        case 4:
            config.cache_block = given_.integer();
            break;
        case 5:
            config.max_new_tokens = given_.integer();
            break;
        case 6:
            config.masks = signed_integer();
            break;
        case 7:
            config.eos_ids = integers(config.num_eos_ids);
            break;
        case 8:
            config.num_stop = given_.below(4);
            config.stop = strings(config.num_stop);
            break;
        case 9:
            config.temperature = given_.real();
            break;
        case 10:
            config.top_k = given_.integer();
            break;
        case 11:
            config.top_p = given_.real();
            break;
        case 12:
            config.seed = given_.raw<std::uint64_t>();
            break;
        case 13:
            config.repetition_penalty = given_.real() * 2;
            break;
        case 14:
            config.prompt_lookup = given_.integer();
            break;
        case 15:
            config.min_p = given_.real();
            break;
        case 16:
            config.cache_salt = string();
            break;
        case 17:
            config.deadline = given_.real();
            break;
        default:
            config.grammar = string();
        }
    }

    const char* const* strings(std::size_t size) {
        auto& made = names_.emplace_back();
        for (std::size_t i = 0; i <= size; ++i) made.push_back(string());
        return given_.below(16) == 0 ? nullptr : made.data();
    }

    Struct<mars_prompt> prompt() {
        Struct<mars_prompt> made(given_, mars_prompt_init);
        const std::size_t kind = given_.below(8);
        if (kind < 4 || kind == 7) made->token_ids = integers(made->num_token_ids);
        if (kind == 3) made->num_token_ids = std::min<std::size_t>(made->num_token_ids, 1);
        if (kind == 4) made->messages = messages();
        if (kind >= 5) {
            const std::string& own = kept_.emplace_back(given_.text());
            made->text = own.c_str();
            if (given_.flag()) made->text_size = own.size();
        }
        return made;
    }

    template <typename T>
    T* maybe(T* pointer) {
        return given_.below(24) == 0 ? nullptr : pointer;
    }

    /// What a callback may see, and when it stops an answer.
    Heard* heard(int most) { return &heard_.emplace_back(Heard{given_.byte() % most}); }

  protected:
    Bytes given_;

  private:
    std::deque<std::string> kept_;
    std::deque<std::vector<unsigned char>> lists_;
    std::deque<std::vector<const char*>> names_;
    std::deque<Heard> heard_;
};
