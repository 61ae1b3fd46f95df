#include "options.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

const char* const usage = R"(usage: mars-run BUNDLE [OPTIONS]

Answer one prompt with a bundle that `mars-export onnx` wrote, streaming.

  -p, --prompt TEXT           the prompt; - or nothing reads standard input
  -f, --file FILE             read the prompt from a file
      --raw                   continue the text as it is, without the chat template
      --token-ids             the prompt is token ids separated by blanks
      --system TEXT           a system message before the prompt
      --exact                 the text of one-token decoding, several tokens a step: the default
      --tau NUMBER            a confidence bound instead: 1 is one token a step, lower is faster and riskier
      --metric NAME           what tau is compared with: probability, margin or entropy [probability]
      --profile NAME          the tau, metric and masks of a calibrated profile of the bundle
  -n, --max-new-tokens N      most tokens to generate; --max-tokens is the same [256]
      --masks auto|full|N    most mask slots of a step; full is as many as the block allows, auto chooses step by step [auto]
      --prompt-lookup N              exact only: propose what followed the last N tokens before; 0 is off [0]
      --grammar NAME          a grammar of the bundle that the answer must follow (mars-export grammar)
      --temperature NUMBER    0 is greedy; --temp is the same [0]
      --top-k N               draw from the k likeliest tokens; 0 is off [0]
      --top-p NUMBER          draw from the smallest set with this probability; 1 is off [1]
      --min-p NUMBER          draw from tokens at least this likely relative to the likeliest; 0 is off [0]
      --seed N                seed of the draws; with a tau and without --masks, all masks are used [0]
      --repetition-penalty X  above 1 makes repetition less likely [1]
      --stop TEXT             end the answer before this text; may be given several times
      --cache-block N         with a tau, tokens whose KV entries become final together: 1 is cursor commit, more the
                              paper's block commit [1]
      --device NAME           cpu, cuda, cuda:1, ...; a missing device is an error [cpu]
      --variant NAME          which of the bundle's variants [the first that runs here]
  -t, --threads N             compute threads, at most one for each core [the backend's choice]
      --cache-bytes N         memory of the prefix cache; 0 turns it off [a small share of the free memory]
      --parse-special         special tokens in messages, such as <|im_end|>, are tokens instead of plain text
      --safe                  for bundles that you do not trust: hash everything, run no engine, limit sizes
      --runs                  mark the tokens that were accepted together
      --json                  print the result as JSON
      --version, --help
)";

namespace {

[[noreturn]] void refuse_number(const std::string& name, const std::string& value) {
    throw UsageError(name + " needs a number, not `" + value + "`");
}

template <typename Integer = std::int64_t>
Integer integer(const std::string& name, const std::string& value, std::int64_t low) {
    Integer number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc() || end != value.data() + value.size()) refuse_number(name, value);
    if (number < static_cast<Integer>(low)) throw UsageError(name + " must be " + std::to_string(low) + " or more, not " + value);
    return number;
}

/// At most the number of cores, with a warning: waiting threads cost minutes.
int threads_of(const std::string& name, const std::string& value) {
    const std::int64_t asked = integer(name, value, 1), cores = std::max(1U, std::thread::hardware_concurrency());
    if (asked > cores) std::cerr << name << " " << asked << ": this machine has " << cores << " cores; " << cores << " threads are used\n";
    return static_cast<int>(std::min(asked, cores));
}

double number(const std::string& name, const std::string& value) {
    char* end = nullptr;
    const double parsed = std::strtod(value.c_str(), &end);
    if (value.empty() || *end != '\0') refuse_number(name, value);
    return parsed;
}

mars::Metric metric_of(const std::string& value) {
    for (const mars::Metric metric : {mars::Metric::probability, mars::Metric::margin, mars::Metric::entropy})
        if (to_string(metric) == value) return metric;
    throw UsageError("--metric must be one of probability, margin, entropy, not `" + value + "`");
}

std::int64_t masks_of(const std::string& value) {
    if (const auto masks = mars::masks_of(value)) return *masks;
    throw UsageError("--masks must be auto, full or a number of 0 or more, not `" + value + "`");
}

using Name = const std::string&;
using Value = const std::string&;

std::map<std::string, std::function<void(Name, Value)>> settings_of(Options& options) {
    auto& config = options.config;
    auto& session = options.session;
    return {
        {"--prompt", [&](Name, Value v) { options.prompt = v; }},
        {"--file", [&](Name, Value v) { options.file = v; }},
        {"--system", [&](Name, Value v) { options.system = v; }},
        {"--profile", [&](Name, Value v) { options.profile = v; }},
        {"--tau", [&](Name n, Value v) { config.tau = number(n, v); }},
        {"--metric", [&](Name, Value v) { config.metric = metric_of(v); }},
        {"--max-new-tokens", [&](Name n, Value v) { config.max_new_tokens = integer(n, v, 1); }},
        {"--masks", [&](Name, Value v) { config.masks = masks_of(v); }},
        {"--prompt-lookup", [&](Name n, Value v) { config.prompt_lookup = integer(n, v, 0); }},
        {"--grammar", [&](Name, Value v) { config.grammar = v; }},
        {"--temperature", [&](Name n, Value v) { config.temperature = number(n, v); }},
        {"--top-k", [&](Name n, Value v) { config.top_k = integer(n, v, 0); }},
        {"--top-p", [&](Name n, Value v) { config.top_p = number(n, v); }},
        {"--min-p", [&](Name n, Value v) { config.min_p = number(n, v); }},
        {"--seed", [&](Name n, Value v) { config.seed = integer<std::uint64_t>(n, v, 0); }},
        {"--repetition-penalty", [&](Name n, Value v) { config.repetition_penalty = number(n, v); }},
        {"--stop", [&](Name, Value v) { config.stop.push_back(v); }},
        {"--cache-block", [&](Name n, Value v) { options.cache_block = integer(n, v, 1); }},
        {"--device", [&](Name, Value v) { session.device = v; }},
        {"--variant", [&](Name, Value v) { session.variant = v; }},
        {"--threads", [&](Name n, Value v) { session.threads = threads_of(n, v); }},
        {"--cache-bytes", [&](Name n, Value v) { session.cache_bytes = integer(n, v, 0); }},
    };
}

std::map<std::string, bool*> switches_of(Options& options) {
    return {{"--raw", &options.raw},
            {"--json", &options.json},
            {"--runs", &options.runs},
            {"--exact", &options.exact},
            {"--help", &options.help},
            {"--version", &options.version},
            {"--token-ids", &options.token_ids},
            {"--parse-special", &options.session.parse_special},
            {"--safe", &options.session.safe}};
}

/// Read the words into `options`; returns the names of the settings among them.
std::set<std::string> read(const std::vector<std::string>& words, Options& options) {
    static const std::map<std::string, std::string> shorts{{"-p", "--prompt"},         {"-f", "--file"},
                                                           {"-h", "--help"},           {"-n", "--max-new-tokens"},
                                                           {"-t", "--threads"},        {"--max-tokens", "--max-new-tokens"},
                                                           {"--temp", "--temperature"}};
    const auto settings = settings_of(options);
    const auto switches = switches_of(options);
    std::set<std::string> names;
    for (auto word = words.begin(); word != words.end(); ++word) {
        std::string name = *word;
        std::optional<std::string> value;
        if (name.rfind("--", 0) == 0 && name.find('=') != std::string::npos) {
            value = name.substr(name.find('=') + 1);
            name.erase(name.find('='));
        }
        if (const auto full = shorts.find(name); full != shorts.end()) name = full->second;
        if (const auto at = switches.find(name); at != switches.end() && !value) {
            *at->second = true;
        } else if (const auto setting = settings.find(name); setting != settings.end()) {
            if (!value && ++word == words.end()) throw UsageError(name + " needs a value");
            setting->second(name, value ? *value : *word);
            names.insert(name);
        } else if (name.size() > 1 && name.front() == '-') {
            throw UsageError("no such option: " + name);
        } else if (options.bundle.empty()) {
            options.bundle = name;
        } else {
            throw UsageError("only one BUNDLE can be given, not also `" + name + "`");
        }
    }
    return names;
}

} // namespace

Options parse_options(int argc, char** argv) {
    Options options;
    const auto& config = options.config;
    const std::set<std::string> names = read({argv + 1, argv + argc}, options);
    options.has_masks = names.count("--masks") > 0;
    options.has_seed = names.count("--seed") > 0;
    const bool has_metric = names.count("--metric") > 0;
    if (options.exact && config.tau) {
        std::ostringstream text;
        text << "--exact verifies every token, --tau " << *config.tau << " accepts likely tokens without verification; give one of them";
        throw UsageError(text.str());
    }
    if (has_metric && !config.tau)
        throw UsageError("--metric " + std::string(to_string(config.metric)) + " says what tau is compared with; give --tau, too");
    if (options.profile && (options.exact || config.tau || has_metric || options.has_masks))
        throw UsageError("a profile sets tau, metric and masks; give either --profile or these options");
    if (options.bundle.empty() && !options.help && !options.version) throw UsageError("a BUNDLE is missing");
    return options;
}
