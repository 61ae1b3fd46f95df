"""lm-evaluation-harness: its generation settings and requests, and a local task end to end where it is
installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.missing import need
from support.tiny import Named

from mars_export import CalibrationError, GenerationConfig, MarsError, Session, SessionError
from mars_export.calibration.harness import Answers

TASK = """\
task: echo
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
{rest}
metadata: {{version: 1}}
"""
GENERATE = 'generation_kwargs: {until: ["\\n"], max_gen_toks: 6}\nmetric_list: [{metric: exact_match}]'
CHOOSE = "doc_to_choice: ['a', 'b']\nmetric_list: [{metric: acc}]"


@pytest.fixture(scope="module")
def answers(bundles: Named) -> Answers:
    return Answers.open(str(bundles("qwen2")), 0.5, max_gen_toks=12, threads=1, batch=2)


def test_answers_are_those_of_the_session(answers: Answers) -> None:
    contexts = ["hello", "the cat", "one two"]
    texts = answers.answer([(context, {"until": []}) for context in contexts])
    assert texts == [
        answers.session.generate(context, GenerationConfig(tau=0.5, max_new_tokens=12)).text
        for context in contexts
    ]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {}),
        ({"until": "\n"}, {"stop": ("\n",)}),
        ({"until": ["\n", "", "Q:"], "max_gen_toks": 5}, {"stop": ("\n", "Q:"), "max_new_tokens": 5}),
        ({"do_sample": False, "temperature": 0.0, "top_p": 0.5}, {}),
        ({"temperature": 0.7, "top_p": 0.5, "seed": 3}, {"temperature": 0.7, "top_p": 0.5, "seed": 3}),
    ],
)
def test_generation_settings(answers: Answers, settings: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert answers.settings(settings) == answers.config.with_values(**wanted)


def test_what_is_not_known_or_does_not_fit_is_refused(answers: Answers, bundles: Named) -> None:
    with pytest.raises(CalibrationError, match="does not know: num_beams"):
        answers.settings({"num_beams": 4})
    with pytest.raises(SessionError, match="this bundle's context holds 512"):
        answers.answer([("a " * 600, {})])
    with pytest.raises(CalibrationError, match="gen_prefix"):
        answers.render([{"role": "user", "content": "x"}], add_generation_prompt=False)
    with pytest.raises(SessionError, match="use either the profile or tau"):
        Answers.open(str(bundles("qwen2")), 0.5, profile="sums")
    with pytest.raises(SessionError, match="give tau"):
        Answers.open(str(bundles("qwen2")), metric="margin")
    for has_tau in ({"tau": 0.5}, {"exact": False}):
        with pytest.raises(SessionError, match="a tau would not use them"):
            Session.open(bundles("qwen2"), threads=1).config(prompt_lookup=2, **has_tau)


def test_without_a_tau_it_is_exact_mode_and_so_the_one_token_text(bundles: Named) -> None:
    exact = Answers.open(str(bundles("qwen2")), max_gen_toks=12, threads=1, batch=2)
    one = Answers.open(str(bundles("qwen2")), 1.0, max_gen_toks=12, threads=1, batch=2)
    assert exact.config.exact and not one.config.exact
    asked = [("hello", {"until": []}), ("the cat", {"until": []})]
    assert exact.answer(asked) == one.answer(asked)


def test_the_chat_template_brings_its_own_special_tokens(bundles: Named) -> None:
    answers = Answers.open(str(bundles("qwen2")), max_gen_toks=12, threads=1)
    messages = [{"role": "user", "content": "hello"}]
    assert answers.encode(answers.render(messages, add_generation_prompt=True)) == answers.session.encode(
        messages
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bundle": ""}, "bundle=PATH is missing"),
        ({"threads": "two"}, "threads must be .* not 'two'"),
        ({"max_gen_toks": -1}, "max_new_tokens must be .* not -1"),
        ({"tau": "fast"}, "tau must be a number of 0 or more, not 'fast'"),
        ({"metric": "luck", "tau": 0.5}, "metric must be one of"),
        ({"run_on": "moon"}, "moon"),
        ({"profile": "sums"}, "no profile `sums`"),
        ({"bundle": "nowhere"}, "nowhere: no such bundle"),
    ],
)
def test_wrong_model_arguments(bundles: Named, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MarsError, match=message):
        Answers.open(**{"bundle": str(bundles("qwen2"))} | arguments)


@pytest.mark.more
@pytest.mark.parametrize(
    ("task", "model_args", "message"),
    [
        ("gsm8k", "bundle=nowhere", "nowhere: no such bundle"),
        ("gsm8k", "bundel=x", "unknown model_args: bundel (known: bundle, tau,"),
        ("no_such_task", "bundle=nowhere", "Tasks not found: no_such_task"),
    ],
)
def test_a_wrong_argument_on_the_command_line_is_one_line(
    tmp_path: Path, task: str, model_args: str, message: str
) -> None:
    need("lm_eval", "lm-eval")
    done = harness(tmp_path, "--tasks", task, "--model_args", model_args)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_harness_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__init__.py").write_text("raise ImportError('not here')")
    done = harness(tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert done.returncode == 1
    assert "pip install 'mars-export[lm-eval]'" in done.stderr
    assert "Traceback" not in done.stderr


def harness(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the harness without a network."""
    command = [sys.executable, "-m", "mars_export.calibration.lm_eval", "--model", "mars_export", *arguments]
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(directory / "hf"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env=os.environ | offline | environment,
        timeout=300,
    )


def evaluate(bundle: Path, directory: Path, kind: str, rest: str) -> subprocess.CompletedProcess[str]:
    """Run the harness on a local task of two rows."""
    need("lm_eval", "lm-eval")
    rows = directory / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"text": text, "answer": 0 if kind == "multiple_choice" else "x"}) + "\n"
            for text in ("hello", "the cat")
        )
    )
    (directory / "echo.yaml").write_text(TASK.format(rows=rows, kind=kind, rest=rest))
    return harness(
        directory,
        "--tasks",
        "echo",
        "--model_args",
        f"bundle={bundle},tau=0.5,threads=1",
        "--include_path",
        str(directory),
        "--batch_size",
        "2",
        "--output_path",
        str(directory / "out"),
        "--log_samples",
    )


@pytest.mark.more
def test_a_local_task(bundles: Named, tmp_path: Path) -> None:
    done = evaluate(bundles("qwen2"), tmp_path, "generate_until", GENERATE)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_echo*.jsonl")
    answers = Answers.open(str(bundles("qwen2")), 0.5, max_gen_toks=6, threads=1)
    for sample in map(json.loads, samples.read_text().splitlines()):
        assert sample["resps"][0] == answers.answer([(sample["doc"]["text"], {"until": ["\n"]})])


@pytest.mark.more
def test_multiple_choice_is_refused_with_the_reason(bundles: Named, tmp_path: Path) -> None:
    done = evaluate(bundles("qwen2"), tmp_path, "multiple_choice", CHOOSE)
    assert done.returncode != 0
    assert "tau has no effect there" in done.stderr
    assert "Traceback" not in done.stderr
