// The acceptance rules: that of tau against tests/conformance/accept.json; exact_test.cpp has the loop of the other.
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

TEST_CASE("verification keeps matching draft tokens and one more token") {
    const std::vector<std::int64_t> own{4, 5, 6, 7};
    CHECK(mars::verify(own, {}, {}, 9) == 1);
    CHECK(mars::verify(own, {4, 5, 6}, {}, 9) == 4);
    CHECK(mars::verify(own, {4, 5}, {}, 9) == 3);
    CHECK(mars::verify(own, {4, 9, 6}, {}, 9) == 2);
    CHECK(mars::verify(own, {9, 5, 6}, {}, 9) == 1);
    CHECK(mars::verify(own, {4, 5, 6}, {5}, 9) == 2);
    CHECK(mars::verify(own, {4, 5, 6}, {}, 3) == 3);
    CHECK(mars::verify(own, {4, 5, 6}, {}, 0) == 0);
    CHECK(mars::verify({}, {}, {}, 9) == 0);
}

TEST_CASE("tau 1, or entropy 0, accepts one token a step") {
    CHECK(mars::is_one_token(1.0, mars::Metric::probability));
    CHECK(mars::is_one_token(1.5, mars::Metric::margin));
    CHECK_FALSE(mars::is_one_token(0.99999, mars::Metric::probability));
    CHECK(mars::is_one_token(0.0, mars::Metric::entropy));
    CHECK_FALSE(mars::is_one_token(1.0, mars::Metric::entropy));
}
