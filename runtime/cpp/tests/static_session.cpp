// A session and a batcher that are destroyed after main: mars-static BUNDLE. Prints an answer, and exits while the batcher is in a step.
#include <cstdio>
#include <memory>

#include <mars/batcher.hpp>

namespace {
std::unique_ptr<mars::Session> session;
std::unique_ptr<mars::Batcher> batcher;
std::unique_ptr<mars::Request> request;
} // namespace

int main(int, char** arguments) {
    session = std::make_unique<mars::Session>(mars::Session::open(arguments[1]));
    mars::GenerationConfig config;
    config.max_new_tokens = 8;
    std::printf("%s\n", session->generate("Once upon", config).text.c_str());
    config.max_new_tokens = 200;
    batcher = std::make_unique<mars::Batcher>(*session);
    request = std::make_unique<mars::Request>(batcher->submit("Once upon", config));
}
