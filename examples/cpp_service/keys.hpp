// API keys. Comparing takes equally long for wrong and right keys.
#pragma once

#include <algorithm>
#include <cctype>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

class Keys {
  public:
    /// No keys: every client is accepted.
    Keys() = default;

    /// Read the keys of a file, one a line; empty lines and lines that begin with # are ignored. Throws
    /// std::runtime_error.
    explicit Keys(const std::string& path) {
        std::ifstream file(path);
        if (!file) throw std::runtime_error(path + ": cannot be read as a file of API keys");
        for (std::string line; std::getline(file, line);) {
            const auto is_blank = [](unsigned char c) { return std::isspace(c) != 0; };
            line.erase(line.begin(), std::find_if_not(line.begin(), line.end(), is_blank));
            line.erase(std::find_if_not(line.rbegin(), line.rend(), is_blank).base(), line.end());
            if (line.empty() || line.front() == '#') continue;
            if (!std::all_of(line.begin(), line.end(), [](unsigned char c) { return c > ' ' && c < 127; }))
                throw std::runtime_error(path + ": a key has spaces or characters that a header cannot carry");
            keys_.push_back(line);
        }
        if (keys_.empty()) throw std::runtime_error(path + ": no key in it; write one a line");
    }

    bool is_open() const { return keys_.empty(); }

    /// The number of the key in an Authorization header. All keys are compared every time.
    std::optional<std::string> find(const std::string& authorization) const {
        std::string scheme = authorization.substr(0, authorization.find(' '));
        std::transform(scheme.begin(), scheme.end(), scheme.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
        const std::string given = authorization.substr(std::min(scheme.size() + 1, authorization.size()));
        std::optional<std::string> found;
        for (std::size_t i = 0; i < keys_.size(); ++i)
            if (is_equal(keys_[i], given)) found = std::to_string(i);
        return scheme == "bearer" ? found : std::nullopt;
    }

  private:
    static bool is_equal(const std::string& key, const std::string& given) {
        unsigned difference = key.size() == given.size() ? 0 : 1;
        for (std::size_t i = 0; i < given.size(); ++i)
            difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(key[i % key.size()]);
        return difference == 0;
    }

    std::vector<std::string> keys_;
};
