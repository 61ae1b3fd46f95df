// A session that answers in microseconds: a model made of hashes with every output, a tokenizer, chat turns, a profile
// and grammars.
#pragma once

#include <cmath>
#include <filesystem>
#include <fstream>

#include <mars/errors.hpp>

#include "../tests/fake.hpp"
#include "../tests/manifest.hpp"
#include "../tests/small_tokenizer.hpp"
#include "session/answers.hpp"

namespace model {

constexpr std::int64_t mask = 0, end = 1, context = 96;

/// small_tokenizer with the mask and the end token in front.
inline mars::Text text() {
    nlohmann::json json = small_tokenizer(no_split);
    for (auto& [token, id] : json["model"]["vocab"].items()) id = id.get<int>() + 2;
    nlohmann::json special = json["added_tokens"][0];
    json["added_tokens"].clear();
    for (const auto& [id, content] : {std::pair(mask, "<|mask|>"), std::pair(end, "<|e|>")}) {
        special["id"] = id;
        special["content"] = content;
        json["model"]["vocab"][content] = id;
        json["added_tokens"].push_back(special);
    }
    const auto turns =
        R"({"between": {"start": {"system": "S", "user": "U"}, "system": {"user": "U"}, "user": {"assistant": "A"}, "assistant": {"user": "U"}},
                           "after": {"user": "A", "system": "A"}, "trimmed": ["system"], "reserved": ["<r>"]})";
    return {mars::Tokenizer::from_json(json.dump()), mars::ChatTurns::from_json(turns)};
}

constexpr std::int64_t vocab_size = 2 + 256 + 7 + 1;

class Cache : public fake::Cache {
  public:
    using fake::Cache::Cache;

    /// The mask may occur in a prompt here.
    std::shared_ptr<const mars::Saved> save(std::int64_t row, std::int64_t length) override {
        const fake::Tokens& from = entries[static_cast<std::size_t>(row)];
        return std::make_shared<fake::Saved>(fake::Tokens(from.begin(), from.begin() + length));
    }
};

/// Its output depends on the previous token and the position. Throws if the loop's inputs are invalid.
class Backend : public mars::Backend {
  public:
    const std::vector<std::string>& outputs() const override { return outputs_; }
    std::optional<std::int64_t> max_slots() const override { return std::nullopt; }
    std::int64_t max_capacity() const override { return context; }
    std::optional<std::int64_t> reproducible_slots() const override { return 1; }
    std::unique_ptr<mars::Cache> new_cache(std::int64_t num_rows) override { return std::make_unique<Cache>(num_rows); }

    void step(mars::Cache& cache, std::int64_t first, const mars::StepInput& input, bool want_logits, mars::StepOutput& output) override {
        auto& entries = dynamic_cast<Cache&>(cache).entries;
        output = {input.outputs, vocab_size, input.want_topk ? top_k : 0, 0, true, {}, {}, {}, {}, {}, {}, {}};
        for (std::int64_t i = 0; i < input.rows; ++i) {
            const std::int64_t start = input.kv_length[static_cast<std::size_t>(i)];
            if (start < 0 || start + input.slots > cache.capacity()) throw std::logic_error("the loop must reserve what a step writes");
            fake::Tokens& row = entries.at(static_cast<std::size_t>(first + i));
            std::copy_n(input.input_ids.begin() + i * input.slots, input.slots, row.begin() + start);
            for (std::int64_t j = 0; j < input.outputs; ++j) {
                const std::int64_t slot = input.output_index.at(static_cast<std::size_t>(i * input.outputs + j));
                if (slot < 0 || slot >= input.slots) throw std::logic_error("an invalid slot");
                predict(row.at(static_cast<std::size_t>(start + slot)), start + slot, want_logits, output);
            }
        }
    }

  private:
    static constexpr std::int64_t top_k = 4;

    static void predict(std::int64_t before, std::int64_t place, bool want_logits, mars::StepOutput& output) {
        const std::uint64_t state = fake::mix(static_cast<std::uint64_t>(before * 1000 + place));
        const auto token = static_cast<std::int64_t>(1 + state % (vocab_size - 1));
        const auto share = static_cast<float>(state >> 40U) / 16777216.0F;
        output.token_ids.push_back(token);
        output.confidence.push_back(share);
        output.margin.push_back(share / 2);
        output.entropy.push_back(1 - share);
        for (std::int64_t k = 0; k < output.top_k; ++k) {
            output.topk_ids.push_back(1 + (token - 1 + 37 * k) % (vocab_size - 1));
            output.topk_logprobs.push_back(static_cast<float>(-k));
        }
        for (std::int64_t each = 0; want_logits && each < vocab_size; ++each)
            output.logits.push_back(each == mask ? -1e9F : each == token ? 9.0F : static_cast<float>((each * 7 + place) % 11) / 2);
    }

    std::vector<std::string> outputs_{"token_ids", "confidence", "margin", "entropy", "topk_ids", "topk_logprobs", "logits"};
};

/// A directory with grammars, removed at the end of the process.
class Directory {
  public:
    Directory() {
        std::string name = (std::filesystem::temp_directory_path() / "mars-fuzz-XXXXXX").string();
        if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary directory can be made");
        path = name;
    }
    ~Directory() {
        std::error_code error;
        std::filesystem::remove_all(path, error);
    }
    Directory(const Directory&) = delete;
    Directory& operator=(const Directory&) = delete;

    std::filesystem::path path;
};

/// `files`: automata, named g0, g1, ...
inline mars::Bundle bundle(const std::filesystem::path& path, const std::vector<std::string>& files) {
    nlohmann::json manifest = valid();
    manifest["model"]["vocab_size"] = vocab_size;
    manifest["model"]["context_length"] = context;
    manifest["tokens"] = {{"mask", mask}, {"eos", {end}}, {"pad", 0}};
    for (const std::string& content : files) {
        const std::string number = std::to_string(manifest["grammars"].size()), file = "grammar-000000000000000" + number + ".dfa";
        std::ofstream(path / file, std::ios::binary) << content;
        manifest["files"].push_back({{"path", file}, {"size", content.size()}, {"sha256", "a"}});
        manifest["grammars"].push_back({{"name", "g" + number}, {"file", file}, {"kind", "regex"}, {"states", 2}});
    }
    return {path, mars::parse_manifest(manifest.dump())};
}

} // namespace model
