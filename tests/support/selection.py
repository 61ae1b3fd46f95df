"""A plugin of tests/conftest.py: `--more` selects the tests of `make check-more`, and the summary names the
reasons of skipped tests.
"""

from __future__ import annotations

from collections import Counter

import pytest

from support import missing

MORE = "make check-more runs it"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--more", action="store_true", help="run the tests of `make check-more`, and only them")
    parser.addoption(
        "--require-all", action="store_true", help="fail where a test lacks something, instead of skipping it"
    )


def pytest_configure(config: pytest.Config) -> None:
    missing.require_all = config.getoption("require_all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    more = [item for item in items if item.get_closest_marker("more") or "chromium" in _fixtures(item)]
    if config.getoption("more"):
        config.hook.pytest_deselected(items=[item for item in items if item not in more])
        items[:] = more
    else:
        for item in more:
            item.add_marker(pytest.mark.skip(reason=MORE))


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The reasons of skipped tests, the most frequent first."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.section(f"{len(reports)} skipped")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:5}  {' '.join(reason.split())}")
