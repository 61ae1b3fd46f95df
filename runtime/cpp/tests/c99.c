/* mars.h in plain C99: mars-c99 BUNDLE ID ... prints the token ids of an exact answer; without arguments it tries refusals only. */
#include <stdio.h>
#include <stdlib.h>

#include <mars/mars.h>

enum { most_ids = 64 };

static int failed(const char* what, mars_error* error) {
    fprintf(stderr, "mars-c99: %s: %s\n", what, mars_error_message(error));
    mars_error_free(error);
    return 1;
}

static int refusals(void) {
    mars_session* session = NULL;
    mars_error* error = NULL;
    mars_session_options options;
    mars_session_options_init(&options, sizeof options);
    if (mars_abi_version() != MARS_ABI_VERSION) return failed("header and library differ", NULL);
    if (mars_session_open("no/such/bundle", &options, &session, &error) != MARS_ERROR_BUNDLE)
        return failed("a bundle that is not there", error);
    if (session != NULL || mars_error_message(error)[0] == '\0') return failed("an error says something, and gives nothing else", error);
    mars_error_free(error);
    return 0;
}

static int count(const mars_event* event, void* user) {
    *(size_t*)user += event->num_tokens;
    return 0; /* not 0 would stop the answer */
}

static int answer(const char* bundle, const int64_t* ids, size_t num_ids) {
    mars_session* session = NULL;
    mars_completion* done = NULL;
    mars_error* error = NULL;
    mars_session_info info;
    mars_prompt prompt;
    mars_config config;
    size_t i, num = 0, seen = 0;
    const int64_t* made;
    if (mars_session_open(bundle, NULL, &session, &error) != MARS_OK) return failed("open", error);
    mars_session_info_init(&info, sizeof info);
    if (mars_session_describe(session, &info, &error) != MARS_OK) return failed("describe", error);
    mars_prompt_init(&prompt, sizeof prompt);
    prompt.token_ids = ids;
    prompt.num_token_ids = num_ids;
    mars_config_init(&config, sizeof config);
    config.max_new_tokens = 24;
    if (mars_generate(session, &prompt, &config, count, &seen, &done, &error) != MARS_OK) return failed("generate", error);
    mars_session_close(session);
    made = mars_completion_token_ids(done, &num);
    for (i = 0; i < num; ++i) printf("%lld ", (long long)made[i]);
    printf("\n");
    mars_completion_free(done);
    return seen == num && info.vocab_size > 0 ? 0 : 1;
}

int main(int argc, char** argv) {
    int64_t ids[most_ids];
    size_t num = 0;
    if (argc == 1) return refusals();
    while (num + 2 < (size_t)argc && num < most_ids) {
        ids[num] = strtoll(argv[num + 2], NULL, 10);
        ++num;
    }
    return answer(argv[1], ids, num);
}
