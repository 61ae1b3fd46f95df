// runtime/text/thinking.py: splits the thinking from the text of a growing answer.
#include <algorithm>
#include <utility>

#include <mars/text.hpp>

#include "joined.hpp"
#include "text/utf8.hpp"

namespace mars {

ThinkingStream::ThinkingStream(std::string open, std::string close, bool is_open)
    : open_(std::move(open)), close_(std::move(close)), place_(is_open ? Place::begun : Place::start) {}

std::size_t ThinkingStream::size() const { return place_ == Place::start || place_ == Place::text ? size_ : pushed_; }

ThinkingStream::Piece ThinkingStream::push(std::string_view text) {
    pushed_ += text.size();
    held_ += text;
    std::string thinking;
    if (place_ == Place::start) {
        const std::string said(utf8::left_stripped(held_));
        if (begins_with(said, open_)) {
            place_ = Place::begun;
            held_ = said.substr(open_.size());
        } else if (!begins_with(open_, said)) {
            place_ = Place::text;
        }
    }
    if (place_ == Place::begun) {
        held_ = std::string(utf8::left_stripped(held_));
        if (!held_.empty()) place_ = Place::thinking;
    }
    if (place_ == Place::thinking) thinking = think();
    if (place_ == Place::closed) {
        held_ = std::string(utf8::left_stripped(held_));
        if (!held_.empty()) {
            place_ = Place::text;
            size_ = pushed_ - held_.size();
        }
    }
    if (place_ != Place::text) return {std::move(thinking), ""};
    return {std::move(thinking), std::exchange(held_, "")};
}

ThinkingStream::Piece ThinkingStream::finish() {
    std::string held = std::exchange(held_, "");
    return place_ == Place::thinking ? Piece{std::move(held), ""} : Piece{"", std::move(held)};
}

/// The thinking up to the closing mark; white space and a beginning of the mark are held back.
std::string ThinkingStream::think() {
    if (const std::size_t end = held_.find(close_); end != std::string::npos) {
        place_ = Place::closed;
        std::string thinking(utf8::right_stripped(std::string_view(held_).substr(0, end)));
        held_.erase(0, end + close_.size());
        return thinking;
    }
    std::size_t num = std::min(close_.size(), held_.size());
    while (!begins_with(close_, std::string_view(held_).substr(held_.size() - num))) --num;
    std::string thinking(utf8::right_stripped(std::string_view(held_).substr(0, held_.size() - num)));
    held_.erase(0, thinking.size());
    return thinking;
}

} // namespace mars
