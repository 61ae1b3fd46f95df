#include <iostream>

#include <mars/session.hpp>

int main(int argc, char** argv) {
    if (argc != 3) {
        std::cerr << "usage: embed BUNDLE REQUEST\n";
        return 2;
    }
    try {
        const mars::Session session = mars::Session::open(argv[1]);
        mars::GenerationConfig config;
        config.max_new_tokens = 32;
        const auto done = session.generate({{"user", argv[2]}}, config, [](const mars::Event& event) {
            std::cout << event.text << std::flush;
            return false; // true stops the answer
        });
        std::cout << "\n" << done.stats.tokens_per_forward() << " tokens/forward\n";
    } catch (const mars::Error& error) {
        std::cerr << "error: " << error.what() << "\n";
        return 1;
    }
}
