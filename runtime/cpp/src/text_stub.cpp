#include <mars/text.hpp>
namespace mars {
struct Tokenizer::State {};
Tokenizer::Tokenizer(std::shared_ptr<const State> s) : state_(std::move(s)) {}
Tokenizer Tokenizer::from_json(std::string_view, std::string_view) { return Tokenizer(nullptr); }
ChatTemplate ChatTemplate::from_json(std::string_view, std::string_view) { return {}; }
std::string ChatTemplate::render(const std::vector<Message>&) const { return ""; }
Text::Text(Tokenizer t, ChatTemplate c) : tokenizer_(std::move(t)), chat_(std::move(c)) {}
std::vector<int64_t> Text::encode(std::string_view) const { return {1}; }
std::vector<int64_t> Text::encode(const std::vector<Message>&) const { return {1}; }
std::string Text::decode(const std::vector<int64_t>&) const { return ""; }
TextStream::TextStream(const Text& t, std::vector<std::string>) : tokenizer_(t.tokenizer()) {}
bool TextStream::push(int64_t) { return false; }
std::string TextStream::read() { return ""; }
std::string TextStream::finish() { return ""; }
} // namespace mars
