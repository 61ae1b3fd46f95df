"""What deploy/ has for Ray against the program: arguments, sizes and times that fit. No Ray here."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.missing import need
from support.paths import ROOT

from mars_export import SessionError
from mars_export.runtime.serve.ray.fleet import Fleet, read_fleet, read_replicas

need("yaml", "dev")

CONFIG = ROOT / "deploy" / "ray-serve.yaml"


def read(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def application() -> Any:
    (found,) = read(CONFIG.read_text(encoding="utf-8"))["applications"]
    return found


def fleet() -> Fleet:
    return read_fleet(application()["args"])


def test_the_import_path_leads_to_a_builder() -> None:
    module, _, name = application()["import_path"].partition(":")
    source = (ROOT / f"{module.partition('.')[2].replace('.', '/')}.py").read_text(encoding="utf-8")
    assert f"def {name}(args: Mapping[str, Any]) -> Application:" in source


# --- arguments ---


def test_arguments_of_each_part() -> None:
    found = read_fleet(
        {
            "bundles": {"small": "a.bundle", "large": "b.bundle"}, "replicas": "2:3", "threads": 4,
            "gpus": 0.5, "device": "cuda", "max_rows": 5, "queue_timeout": 7.0,
        }
    )  # fmt: skip
    assert (read_replicas(found.replicas), found.threads, found.gpus) == ((2, 3), 4, 0.5)
    assert (found.bundles["large"], found.session) == ("b.bundle", {"device": "cuda"})
    assert (found.options.limits.max_rows, found.options.queue_timeout) == (5, 7.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bundles": {}}, "with at least one"),
        ({"bundles": {"a": 3}}, "names to paths"),
        ({"nonsense": 1, "more": 1}, "unknown 'nonsense', 'more'"),
        ({"replicas": "3:2"}, "MIN:MAX"),
        ({"replicas": 0}, "MIN:MAX"),
        ({"replicas": True, "threads": 0}, "1 or more, not True; threads must be"),
        ({"gpus": -1}, "gpus must be"),
        ({"gpus": float("nan")}, "gpus must be"),
        ({"log_level": "loud"}, "log_level must be"),
        ({"log_format": "yaml"}, "log_format must be"),
        ({"max_rows": 0}, "max_rows must be"),
        ({"drain_timeout": -1}, "drain_timeout must be"),
        ({"keys": ["secret"]}, "unknown 'keys'"),
    ],
)
def test_wrong_arguments_are_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SessionError, match=re.escape(words)):
        read_fleet({"bundles": {"a": "x"}, **changes})
