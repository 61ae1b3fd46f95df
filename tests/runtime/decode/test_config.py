"""A request's settings are checked where they are built, and every wrong one is named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mars_export import GenerationConfig, SessionError
from mars_export.runtime.decode.config import repeatable

WRONG: dict[str, tuple[Any, ...]] = {
    "tau": (-0.1, math.nan, math.inf, "0.9", True), "metric": ("certainty",), "max_new_tokens": (0, 1.5),
    "masks": (-1,), "eos_ids": ((-1,), (1.0,), 5), "stop": (("",), "", [1], 5, {"text"}),
    "choice": ("ab", [1]), "min_p": (-0.1, 1.5, "0.1"), "temperature": (-1, math.nan), "top_k": (-1,),
    "top_p": (0, 1.1), "seed": (-1, 2**64), "repetition_penalty": (0,), "presence_penalty": (2.5,),
    "frequency_penalty": (-2.5,), "logit_bias": ({3: 101}, {-1: 1}, {"3": 1}, 5), "top_logprobs": (21,),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SessionError, match=f"{name} must be"):
        GenerationConfig(**{name: value})


def test_lists_become_tuples_and_one_stop_string_is_one() -> None:
    config = GenerationConfig(stop=["a", "b"], eos_ids=[1, 2])
    assert (config.stop, config.eos_ids) == (("a", "b"), (1, 2))
    assert GenerationConfig(choice=["on", "off"]) == GenerationConfig(choice=("on", "off"))
    assert config == GenerationConfig(stop=("a", "b"), eos_ids=(1, 2))
    assert hash(config.with_values(logit_bias={3: -1.5}))
    assert GenerationConfig(stop="###").stop == ("###",)


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(SessionError, match=r"tau must be.*top_p must be.*seed must be"):
        GenerationConfig(tau=-1, top_p=2, seed=-5)


def test_a_schema_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GenerationConfig(schema={"enum": ["x" * 1000]})
    monkeypatch.setattr("mars_export.runtime.answer_format.json", None)
    assert config.with_values(seed=1).schema == config.schema


def test_a_changed_copy_is_checked_too() -> None:
    assert GenerationConfig(tau=0.5).with_values(tau=0.7).tau == 0.7
    with pytest.raises(SessionError, match="tau must be"):
        GenerationConfig().with_values(tau=-1)


@pytest.mark.parametrize(
    ("tau", "metric", "expected"),
    [
        (1.0, "probability", True),
        (1.5, "margin", True),
        (0.999, "probability", False),
        (0.0, "entropy", True),
        (1.0, "entropy", False),
        (0.0, "margin", False),
    ],
)
def test_which_tau_means_one_token(tau: float, metric: str, expected: bool) -> None:
    assert GenerationConfig(tau=tau, metric=metric).one_token is expected


FULL = GenerationConfig(tau=0.9, masks="full")


@pytest.mark.parametrize(
    ("config", "masks"),
    [
        (FULL, "full"),
        (GenerationConfig(tau=0.9, masks=3), 3),
        (repeatable(FULL, has_masks=True, has_seed=True), "full"),
        (repeatable(GenerationConfig(tau=0.9), has_masks=False, has_seed=True), "auto"),
        (repeatable(GenerationConfig(tau=0.9, temperature=1), has_masks=False).with_values(seed=1), "auto"),
        (GenerationConfig().with_profile(FULL), "auto"),
        (GenerationConfig(masks=3).with_profile(FULL.with_values(masks=2)), "auto"),
        (GenerationConfig().with_profile(FULL).with_values(masks="full"), "full"),
    ],
)
def test_exact_mode_after_a_tau_keeps_the_masks_that_the_user_chose(
    config: GenerationConfig, masks: object
) -> None:
    assert config.with_values(exact=True).masks == masks
