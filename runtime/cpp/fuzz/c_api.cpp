// Fuzzes the C interface: any bytes are a sequence of calls with odd values, invalid strings, NULL, structs of other
// versions and handles that have ended. Each call must return a true status, and its results must be readable to their
// end.
#include <cmath>
#include <thread>

#include <mars/mars.h>

#include "c_handles.hpp"
#include "fuzz.hpp"

namespace {

constexpr std::size_t max_calls = 60; // of an input

class Calls : private Handles {
  public:
    using Handles::Handles;

    void run() {
        for (std::size_t i = 0; i < max_calls && !given_.is_over(); ++i) call();
    }

  private:
    void check(mars_completion* completion) {
        std::size_t size = 0, num = 0;
        const char* shown = mars_completion_text(completion, &size);
        require(is_text(shown, size), "an answer is UTF-8");
        const std::int64_t* ids = mars_completion_token_ids(completion, &num);
        check_tokens(ids, mars_completion_confidences(completion, maybe(&num)), num);
        mars_completion_finish_reason(completion);
        Struct<mars_stats> stats(given_, mars_stats_init);
        if (!good(mars_completion_stats(completion, maybe(stats.get()), error()))) return;
        if (stats->struct_size < sizeof(mars_stats)) return;
        std::int64_t steps = 0;
        for (std::size_t i = 0; i < stats->num_accepted; ++i) steps += stats->accepted[i];
        require(steps <= stats->forwards + stats->forced, "tokens come from steps");
        require(stats->tokens == static_cast<std::int64_t>(num), "tokens are counted");
        require(stats->rejected_draft_tokens + stats->accepted_draft_tokens == stats->draft_tokens, "draft tokens hold or do not");
    }

    void next(mars_stream* stream) {
        Struct<mars_event> event(given_, mars_event_init);
        std::int32_t done = 0;
        const bool is_good = good(mars_stream_next(stream, maybe(event.get()), maybe(&done), error()));
        if (is_good && event->struct_size >= sizeof(mars_event)) check_event(*event.get());
    }

    void next(mars_request* request) {
        Struct<mars_event> event(given_, mars_event_init);
        std::int32_t done = 0;
        const bool is_good = good(mars_request_next(request, maybe(event.get()), maybe(&done), error()));
        if (is_good && event->struct_size >= sizeof(mars_event)) check_event(*event.get());
    }

    void finish(mars_completion* made, bool is_good) {
        if (is_good) check(made);
        keep(place(completions_), made, is_good, mars_completion_free);
    }

    void generate() {
        auto asked = prompt();
        auto settings = config();
        mars_completion* made = nullptr;
        Heard* const heard = this->heard(20);
        const bool is_good =
            good(mars_generate(session_, maybe(asked.get()), maybe(settings.get()), maybe(&on_event), heard, &made, error()));
        finish(made, is_good);
    }

    void generate_batch() {
        std::size_t num = given_.below(5);
        std::vector<Struct<mars_prompt>> asked;
        std::vector<Struct<mars_config>> settings;
        for (std::size_t i = 0; i < num; ++i) {
            asked.push_back(prompt());
            settings.push_back(config());
            if (i > 0 && given_.below(4) != 0) settings[i]->cache_block = settings[0]->cache_block;
        }
        std::vector<const mars_prompt*> prompts;
        std::vector<const mars_config*> configs;
        for (std::size_t i = 0; i < num; ++i) {
            prompts.push_back(maybe(asked[i].get()));
            configs.push_back(maybe(settings[i].get()));
        }
        mars_completion* made[5] = {};
        Heard* const heard = this->heard(40);
        const bool is_good = good(mars_generate_batch(session_, maybe(prompts.data()), maybe(configs.data()), num, maybe(&on_event), heard,
                                                      maybe(+made), error()));
        for (std::size_t i = 0; i < num; ++i) {
            require(is_good == (made[i] != nullptr), "all are there or none");
            if (is_good) check(made[i]);
            mars_completion_free(made[i]);
        }
    }

    void open_session() {
        Struct<mars_session_options> options(given_, mars_session_options_init);
        options->threads = static_cast<std::int32_t>(given_.integer());
        options->verify = static_cast<std::int32_t>(given_.below(5)) - 1;
        options->cache_bytes = given_.integer();
        options->safe = given_.flag() ? 1 : 0;
        options->parse_special = given_.flag() ? 1 : 0;
        static constexpr const char* devices[] = {"cpu", "CPU", "cpu:1", "cuda:0", "cuda:99999999999999999999", "cuda:-1", ":", nullptr};
        options->device = given_.flag() ? devices[given_.below(std::size(devices))] : string();
        options->variant = string();
        options->num_options = given_.below(3);
        options->option_names = strings(options->num_options);
        options->option_values = strings(options->num_options);
        options->on_log = on_log;
        mars_session* made = nullptr;
        const std::string path = bundle().path.string();
        const bool is_good = good(mars_session_open(given_.flag() ? path.c_str() : string(), maybe(options.get()), &made, error()));
        require(is_good == (made != nullptr), "a session is there where the call was good");
        mars_session_close(made);
    }

    void describe() {
        Struct<mars_session_info> info(given_, mars_session_info_init);
        if (!good(mars_session_describe(session_, maybe(info.get()), error())) || info->struct_size < sizeof(mars_session_info)) return;
        require(info->vocab_size > 0 && info->variant != nullptr && *info->variant != '\0', "a session says what runs");
        for (std::size_t i = 0; i < info->num_outputs; ++i) require(*info->outputs[i] != '\0', "outputs have names");
        for (std::size_t i = 0; i < info->num_profiles; ++i) require(*info->profiles[i] != '\0', "profiles have names");
    }

    void costs() {
        std::size_t num = 0;
        const std::int64_t* positions = integers(num);
        std::vector<double> seconds;
        for (std::size_t i = 0; i < num; ++i) seconds.push_back(given_.real());
        good(mars_session_set_cost(session_, positions, maybe(seconds.data()), num, error()));
    }

    void prefixes() {
        Struct<mars_prefix_stats> stats(given_, mars_prefix_stats_init);
        if (good(mars_session_prefix_stats(session_, maybe(stats.get()), error())) && stats->struct_size >= sizeof(mars_prefix_stats))
            require(stats->num_bytes >= 0 && stats->hits <= stats->queries && stats->hit_tokens <= stats->query_tokens,
                    "hits are of queries");
        if (given_.flag()) good(mars_session_forget_prefixes(session_, error()));
    }

    void profile() {
        auto settings = config();
        good(mars_config_of_profile(session_, string(), maybe(settings.get()), error()));
    }

    void encode() {
        auto asked = prompt();
        std::size_t num = 0;
        std::vector<std::int64_t> ids(given_.below(200));
        if (!good(mars_encode(session_, maybe(asked.get()), maybe(ids.data()), ids.size(), maybe(&num), error())) || num > ids.size())
            return;
        ids.resize(num);
        std::size_t size = 0;
        std::vector<char> shown(given_.byte() + 1);
        if (good(mars_decode(session_, ids.data(), num, maybe(shown.data()), shown.size(), maybe(&size), error())) && size < shown.size())
            require(is_text(shown.data(), size), "ids say a text");
    }

    void decode() {
        std::size_t num = 0, size = 0;
        const std::int64_t* ids = integers(num);
        char shown[40];
        if (good(mars_decode(session_, ids, num, maybe(+shown), sizeof shown, &size, error())) && size < sizeof shown)
            require(is_text(shown, size), "any ids say a text, or none");
    }

    void open_stream() {
        auto asked = prompt();
        auto settings = config();
        mars_stream* made = nullptr;
        const bool is_good = good(mars_stream_open(session_, maybe(asked.get()), maybe(settings.get()), &made, error()));
        keep(place(streams_), made, is_good, mars_stream_close);
    }

    void steer(mars_stream* stream) {
        const double tau = given_.real();
        if (given_.flag()) {
            const bool is_good = good(mars_stream_set_tau(stream, given_.flag() ? tau : MARS_EXACT, error()));
            require(!is_good || stream != nullptr, "nothing has no tau");
        }
        require(std::isnan(mars_stream_tau(stream)) == (stream == nullptr), "a stream has a tau");
        if (given_.below(4) == 0) mars_stream_cancel(stream);
    }

    /// Another thread steers and ends what this one runs.
    void race() {
        mars_stream* const stream = place(streams_);
        const bool ends = given_.flag();
        std::thread other([stream, ends] {
            mars_stream_set_tau(stream, 0.5, nullptr);
            mars_stream_tau(stream);
            if (ends) mars_stream_cancel(stream);
        });
        for (int i = 0; i < 3; ++i) next(stream);
        other.join();
    }

    void complete(const mars_stream* stream) {
        mars_completion* made = nullptr;
        const bool is_good = good(mars_stream_completion(stream, &made, error()));
        finish(made, is_good);
    }

    void complete(mars_request* request) {
        mars_completion* made = nullptr;
        const bool waits = given_.flag();
        const bool is_good = good(waits ? mars_request_result(request, given_.flag() ? given_.real() : MARS_FOREVER, &made, error())
                                        : mars_request_completion(request, &made, error()));
        finish(made, is_good);
    }

    void talk() {
        const std::size_t at = given_.below(places);
        mars_conversation*& own = talks_[at];
        mars_stream*& reply = replies_[at];
        const std::size_t kind = given_.below(9);
        if (kind == 0) {
            mars_conversation* made = nullptr;
            const bool is_good = good(mars_conversation_open(session_, string(), given_.flag() ? 1 : 0, &made, error()));
            if (is_good) reply = nullptr; // the old conversation takes it along
            keep(own, made, is_good, mars_conversation_close);
        } else if (kind == 1 || kind == 2) {
            auto settings = config();
            const char* question = string();
            mars_stream* made = nullptr;
            const bool is_good =
                good(kind == 1 ? mars_conversation_send(own, question, maybe(settings.get()), &made, error())
                               : mars_conversation_edit(own, question, maybe(settings.get()), signed_integer(), &made, error()));
            require(is_good == (made != nullptr), "a question has an answer");
            if (is_good) reply = made; // else the last answer is still there
        } else if (kind == 3) {
            good(mars_conversation_undo(own, given_.integer(), error()));
        } else if (kind == 4) {
            good(mars_conversation_reset(own, error()));
        } else if (kind == 5) {
            good(mars_conversation_resume(own, messages(), error()));
        } else if (kind == 6) {
            const char* said = nullptr;
            if (good(mars_conversation_messages(own, maybe(&said), error())) && said != nullptr)
                require(nlohmann::json::accept(said), "messages are JSON");
            require(mars_conversation_dropped(own) >= 0, "turns are counted");
        } else {
            for (std::size_t i = given_.below(20); i > 0; --i) next(reply);
            if (given_.flag()) complete(reply);
            if (given_.below(4) == 0) steer(reply);
            mars_stream_close(reply); // the conversation's: nothing
        }
    }

    void open_batcher() {
        Struct<mars_limits> limits(given_, mars_limits_init);
        limits->max_rows = given_.below(8) == 0 ? given_.integer() : 1 + static_cast<std::int64_t>(given_.below(4));
        if (given_.flag()) limits->max_waiting = given_.integer();
        if (given_.flag()) limits->prefill_tokens = given_.integer();
        if (given_.below(4) == 0) limits->max_prompt_tokens = given_.integer();
        if (given_.below(4) == 0) limits->max_new_tokens = given_.integer();
        if (given_.below(4) == 0) limits->max_stops = given_.integer();
        if (given_.below(4) == 0) limits->kv_bytes = given_.flag() ? given_.integer() : 100 * given_.byte();
        if (given_.below(4) == 0) limits->client_share = given_.real();
        if (given_.below(4) == 0) limits->max_rows_per_client = given_.integer();
        if (given_.below(4) == 0) limits->cache_block = given_.integer();
        mars_batcher* made = nullptr;
        const bool is_good = good(mars_batcher_open(session_, maybe(limits.get()), &made, error()));
        keep(place(batchers_), made, is_good, mars_batcher_free);
    }

    void submit() {
        auto asked = prompt();
        auto settings = config();
        Struct<mars_entry> entry(given_, mars_entry_init);
        if (given_.below(4) == 0) entry->wait = given_.flag() ? given_.real() : MARS_FOREVER;
        if (given_.flag()) entry->client = string();
        if (given_.below(4) == 0) {
            entry->on_event = on_event;
            entry->user = heard(20);
        }
        mars_request* made = nullptr;
        const bool is_good =
            good(mars_batcher_submit(place(batchers_), maybe(asked.get()), maybe(settings.get()), maybe(entry.get()), &made, error()));
        keep(place(requests_), made, is_good, mars_request_free);
    }

    void follow(mars_request* request) {
        for (std::size_t i = given_.below(6); i > 0; --i) next(request);
        if (given_.flag()) complete(request);
        if (given_.below(4) == 0) good(mars_request_set_tau(request, given_.flag() ? given_.real() : MARS_EXACT, error()));
        require(std::isnan(mars_request_tau(request)) == (request == nullptr), "a request has a tau");
        mars_request_finish_reason(request);
        if (given_.below(4) == 0) mars_request_cancel(request);
    }

    void look(mars_batcher* batcher) {
        Struct<mars_batcher_state> state(given_, mars_batcher_state_init);
        if (good(mars_batcher_describe(batcher, maybe(state.get()), error())) && state->struct_size >= sizeof(mars_batcher_state)) {
            const std::int64_t ended = state->finished + state->failed + state->cancelled + state->expired;
            require(ended <= state->accepted && state->kv_usage >= 0 && state->kv_usage <= 1, "counts add up");
        }
        if (given_.below(4) != 0) return;
        std::int32_t has_ended = 0;
        good(mars_batcher_close(batcher, given_.real(), given_.flag() ? given_.real() : MARS_FOREVER, maybe(&has_ended), error()));
    }

    void call();
};

void Calls::call() {
    switch (given_.below(24)) {
    case 0:
    case 1:
        return generate();
    case 2:
        return generate_batch();
    case 3:
        return open_session();
    case 4:
        return describe();
    case 5:
        return costs();
    case 6:
        return prefixes();
    case 7:
        return profile();
    case 8:
        return encode();
    case 9:
        return decode();
    case 10:
    case 11:
        return open_stream();
    case 12:
        return next(place(streams_));
    case 13:
        return steer(place(streams_));
    case 14:
        return race();
    case 15:
        return complete(place(streams_));
    case 16:
    case 17:
        return talk();
    case 18:
        return open_batcher();
    case 19:
    case 20:
        return submit();
    case 21:
        return follow(place(requests_));
    case 22:
        return look(place(batchers_));
    default:
        if (given_.below(8) == 0) close_session();
    }
}

} // namespace

std::vector<std::string> seeds() {
    std::vector<std::string> made;
    std::uint64_t state = 1;
    for (std::size_t i = 0; i < 64; ++i) { // any bytes are calls; the last ones above 4 KiB
        std::string bytes(1, static_cast<char>(i % 4));
        for (std::size_t size = i < 48 ? 60 + 20 * i : 5000; bytes.size() < size;)
            bytes += static_cast<char>((state = fake::mix(state)) & 0xFFU);
        made.push_back(std::move(bytes));
    }
    return made;
}

/// The first byte: a quarter of the inputs run on the real bundle, if there is one.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) return 0;
    Calls calls(Bytes(data + 1, size - 1), data[0] % 4 == 3 ? real_session() : nullptr);
    calls.run();
    return 0;
}
