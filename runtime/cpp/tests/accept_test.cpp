// The acceptance rule against tests/conformance/accept.json.
#include "conformance.hpp"

TEST_CASE("every case of accept.json") {
    for (const auto& each : conformance("accept.json")) {
        CAPTURE(each["name"].get<std::string>());
        std::vector<double> confidences;
        for (const auto& confidence : each["confidences"]) confidences.push_back(number_of(confidence));
        CHECK(mars::accept(each["token_ids"], confidences, each["tau"], metric_of(each["metric"]), each["eos_ids"], each["limit"]) ==
              each["accepted"].get<std::int64_t>());
    }
}

TEST_CASE("one-token mode is a rule of its own") {
    CHECK(mars::is_one_token(1.0, mars::Metric::probability));
    CHECK(mars::is_one_token(1.5, mars::Metric::margin));
    CHECK_FALSE(mars::is_one_token(0.99999, mars::Metric::probability));
    CHECK(mars::is_one_token(0.0, mars::Metric::entropy));
    CHECK_FALSE(mars::is_one_token(1.0, mars::Metric::entropy));
}
