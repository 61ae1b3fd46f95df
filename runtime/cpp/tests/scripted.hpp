// The grammars of tests/conformance/grammar.json, their vocabulary, and a model that answers by a script. Runs nothing.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include <mars/config.hpp>

#include "conformance.hpp"
#include "fake.hpp"
#include "structured/automaton.hpp"
#include "structured/grammar.hpp"
#include "structured/vocabulary.hpp"
#include "text/tokenizer.hpp"

namespace scripted {

using Json = nlohmann::json;

inline std::string decoded(const std::string& base64) {
    const std::string letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string bytes;
    unsigned bits = 0, held = 0;
    for (const char letter : base64) {
        if (letter == '=') break;
        held = (held << 6U | static_cast<unsigned>(letters.find(letter))) & 0xFFFFU;
        bits += 6;
        if (bits < 8) continue;
        bits -= 8;
        bytes += static_cast<char>(held >> bits & 0xFFU);
    }
    return bytes;
}

/// The conformance file, and what its parts are.
struct Kept {
    Json json = conformance("grammar.json");
    mars::Tokenizer tokenizer = mars::Tokenizer::from_json(json["tokenizer"].get<std::string>());
    std::shared_ptr<mars::Vocabulary> vocabulary = std::make_shared<mars::Vocabulary>(tokenizer, json["vocab_size"].get<std::int64_t>());
    std::int64_t end = json["end"];
    fake::Tokens prompt = json["prompt"];

    std::string content(std::size_t number) const { return decoded(json["files"][number]["file"].get<std::string>()); }

    std::shared_ptr<mars::Walk> walk(std::size_t number) const {
        return std::make_shared<mars::Walk>(mars::parse_automaton(content(number), "a test"), vocabulary);
    }
};

inline const Kept& kept() {
    static const Kept all;
    return all;
}

/// The model of tests/support/scripted.py.
class Model : public mars::Backend {
  public:
    Model(fake::Tokens script, const Json& wanted)
        : script_(std::move(script)), seed_(wanted["seed"]), top_k_(wanted["top_k"]),
          plain([this](const fake::Tokens& known, std::int64_t masks) { return this->wanted(known, masks); }, 1000000,
                optional_of<std::int64_t>(wanted["max_slots"]), optional_of<std::int64_t>(wanted.value("max_outputs", Json()))) {
        if (top_k_ > 0) outputs_.insert(outputs_.end(), {"topk_ids", "topk_logprobs"});
        if (wanted["logits"]) outputs_.emplace_back("logits");
        plain.record = true;
    }

    const std::vector<std::string>& outputs() const override { return outputs_; }
    std::optional<std::int64_t> max_slots() const override { return plain.max_slots(); }
    std::optional<std::int64_t> max_outputs() const override { return plain.max_outputs(); }
    std::int64_t max_capacity() const override { return plain.max_capacity(); }
    std::unique_ptr<mars::Cache> new_cache(std::int64_t num_rows) override { return plain.new_cache(num_rows); }

    void step(mars::Cache& cache, std::int64_t first, const mars::StepInput& input, bool want_logits, mars::StepOutput& output) override {
        plain.step(cache, first, input, false, output);
        output.vocab_size = kept().vocabulary->size();
        output.top_k = input.want_topk ? top_k_ : 0;
        output.logits.clear();
        output.topk_ids.clear();
        output.topk_logprobs.clear();
        for (std::size_t i = 0; i < output.token_ids.size(); ++i) {
            const std::int64_t at = input.kv_length[i / static_cast<std::size_t>(input.outputs)] + input.output_index[i] + 1;
            for (std::int64_t k = 0; k < output.top_k; ++k) output.topk_logprobs.push_back(static_cast<float>(-k));
            const fake::Tokens wide = likeliest(at, output.token_ids[i], output.top_k);
            output.topk_ids.insert(output.topk_ids.end(), wide.begin(), wide.end());
            if (!want_logits) continue;
            const std::size_t begin = output.logits.size();
            for (std::int64_t token = 0; token < output.vocab_size; ++token)
                output.logits.push_back(
                    static_cast<float>(fake::mix(seed_ ^ fake::mix(static_cast<std::uint64_t>(at * 4096 + token))) % 4096));
            output.logits[begin] = -1.0F;
            const fake::Tokens top = likeliest(at, output.token_ids[i], std::max(top_k_, std::int64_t{1}));
            for (std::size_t k = 0; k < top.size(); ++k)
                output.logits[begin + static_cast<std::size_t>(top[k])] = 10000.0F - static_cast<float>(k);
        }
    }

    /// What it predicts after `known` and `masks` masks.
    std::pair<std::int64_t, float> wanted(const fake::Tokens& known, std::int64_t masks) const {
        const auto at = static_cast<std::uint64_t>(known.size()) + static_cast<std::uint64_t>(masks);
        const std::uint64_t state = fake::mix(seed_ ^ fake::mix(at));
        const auto place = static_cast<std::int64_t>(at) - static_cast<std::int64_t>(kept().prompt.size());
        const auto drawn = 1 + static_cast<std::int64_t>(fake::mix(state) % static_cast<std::uint64_t>(kept().vocabulary->size() - 1));
        const bool follows = place >= 0 && place < static_cast<std::int64_t>(script_.size()) && state % 8 != 0;
        const std::uint64_t draw = fake::mix(state + static_cast<std::uint64_t>(masks)) % (1U << 24U);
        return {follows ? script_[static_cast<std::size_t>(place)] : drawn, 0.5F + static_cast<float>(draw) / 33554432.0F};
    }

    /// The likeliest tokens of a position, of which `first` is the first.
    fake::Tokens likeliest(std::int64_t at, std::int64_t first, std::int64_t num) const {
        fake::Tokens found;
        if (num > 0) found.push_back(first);
        for (std::uint64_t i = 0; static_cast<std::int64_t>(found.size()) < num; ++i) {
            const std::uint64_t drawn = fake::mix(seed_ ^ fake::mix(static_cast<std::uint64_t>(at) * 1000 + i));
            const auto token = 1 + static_cast<std::int64_t>(drawn % static_cast<std::uint64_t>(kept().vocabulary->size() - 1));
            if (std::find(found.begin(), found.end(), token) == found.end()) found.push_back(token);
        }
        return found;
    }

  private:
    fake::Tokens script_;
    std::uint64_t seed_;
    std::int64_t top_k_;
    std::vector<std::string> outputs_{"token_ids", "confidence"};

  public:
    fake::Backend plain;
};

inline mars::GenerationConfig config_of(const Json& wanted) {
    mars::GenerationConfig config;
    config.tau = optional_of<double>(wanted["tau"]);
    config.max_new_tokens = wanted["max_new_tokens"];
    config.masks = wanted["masks"] == "full" ? mars::all_masks : wanted["masks"].get<std::int64_t>();
    config.prompt_lookup = wanted["prompt_lookup"];
    return config;
}

} // namespace scripted
