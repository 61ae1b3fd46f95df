"""mars-run, the twin of `mars-export generate`."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from support.cabi import build
from support.fixtures import Named, Sessions
from support.shell import call
from typer.testing import CliRunner

from mars_export import GenerationConfig
from mars_export.cli import app


def run(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [build() / "mars-run", *map(str, arguments)]
    return call(*command, input=stdin)


def test_mars_run_is_the_twin_of_generate(bundles: Named, sessions: Sessions, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("the éclair")
    options = ("--tau", 0.4, "--masks", "full", "--max-new-tokens", 20, "--threads", 1, "--json")
    chat = [{"role": "user", "content": "the éclair"}]
    wanted = sessions("llama").generate(chat, GenerationConfig(tau=0.4, max_new_tokens=20, masks="full"))
    for prompt, stdin in (
        (("-p", "the éclair"), ""),
        (("--file", tmp_path / "prompt.txt"), ""),
        ((), "the éclair"),
        (("-p", "-"), "the éclair"),
    ):
        done = run(bundles("llama"), *prompt, *options, stdin=stdin)
        assert done.returncode == 0, done.stderr
        made = json.loads(done.stdout)
        assert made["token_ids"] == list(wanted.token_ids) and made["text"] == wanted.text
        assert made["finish_reason"] == wanted.finish_reason
        assert (made["exact"], made["tau"]) == (False, 0.4)
        assert made["confidences"] == [round(c, 6) for c in wanted.confidences]
        assert list(made["stats"]) == list(wanted.stats.to_dict())
        assert made["stats"]["accepted"] == wanted.stats.to_dict()["accepted"]
    exact = sessions("llama").generate(
        chat, GenerationConfig(max_new_tokens=20, masks="full", prompt_lookup=2)
    )
    for words in ((), ("--exact",), ("--prompt-lookup", 2)):
        done = run(bundles("llama"), "-p", "the éclair", *words, "--max-new-tokens", 20, "--json")
        made = json.loads(done.stdout)
        assert made["token_ids"] == list(exact.token_ids)
        assert (made["exact"], made["tau"]) == (True, None)
        assert (
            made["stats"]["draft_tokens"]
            == made["stats"]["accepted_draft_tokens"] + made["stats"]["rejected_draft_tokens"]
            > 0
        )
    for words, masks in (
        (("--seed", 7), "full"),
        (("--temperature", 1), "full"),
        (("--seed", 7, "--masks", "auto"), "auto"),
        (("--seed", 7, "--masks", 1), 1),
        ((), "auto"),
    ):
        done = run(
            bundles("llama"), "-p", "the éclair", "--tau", 0.4, "--max-new-tokens", 9, "--json", *words
        )
        same = [
            "generate",
            bundles("llama"),
            "-p",
            "the éclair",
            "--tau",
            0.4,
            "--max-new-tokens",
            9,
            "--json",
        ]
        theirs = CliRunner().invoke(app, [str(word) for word in (*same, *words)])
        made, expected = json.loads(done.stdout), json.loads(theirs.stdout)
        assert made["masks"] == expected["masks"] == masks, words
        if masks == "full":
            assert made["token_ids"] == expected["token_ids"], words
    shown = run(
        bundles("llama"), "--raw", "--prompt=the éclair", "--tau=0.4", "--masks=full", "--max-new-tokens=20"
    )
    raw = sessions("llama").generate("the éclair", GenerationConfig(tau=0.4, max_new_tokens=20))
    assert shown.stdout == raw.text + "\n"
    assert re.search(r"^\d+ tokens, .* ended by ", shown.stderr)


def test_mars_run_takes_the_short_forms_that_hands_know(bundles: Named) -> None:
    asked = (bundles("llama"), "-p", "hello", "--seed", 3, "--json")
    long = run(*asked, "--max-new-tokens", 5, "--temperature", 0.7, "--threads", 1)
    short = run(*asked, "-n", 5, "--temp=0.7", "-t", 1)
    assert long.returncode == short.returncode == 0, short.stderr
    assert json.loads(long.stdout)["token_ids"] == json.loads(short.stdout)["token_ids"]
    assert len(json.loads(run(*asked, "--max-tokens", 3).stdout)["token_ids"]) <= 3


def test_mars_run_starts_no_more_threads_than_cores(bundles: Named) -> None:
    done = run(bundles("llama"), "-p", "hello", "-n", 2, "-t", 999)
    assert done.returncode == 0, done.stderr
    said = re.search(
        r"^--threads 999: this machine has (\d+) cores; (\d+) threads are used$", done.stderr, re.M
    )
    assert said is not None and said[1] == said[2]
    assert "this machine has" not in run(bundles("llama"), "-p", "hello", "-n", 2, "-t", 1).stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "a BUNDLE is missing"),
        (("a", "b"), 2, "not also `b`"),
        (("a", "--tau"), 2, "--tau needs a value"),
        (("a", "--tau", "much"), 2, "--tau needs a number, not `much`"),
        (("a", "--max-new-tokens", "0"), 2, "--max-new-tokens must be 1 or more"),
        (("a", "--seed", "-1"), 2, "--seed needs a number"),
        (("a", "--tau", "0.9", "--exact"), 2,
         "--exact verifies every token, --tau 0.9 accepts"),
        (("a", "--metric", "margin"), 2, "--metric margin says what tau is compared with; give --tau, too"),
        (("a", "--prompt-lookup", "-1"), 2, "--prompt-lookup must be 0 or more"),
        (("a", "--profile", "x", "--tau", "1"), 2, "give either --profile or these options"),
        (("a", "--profile", "x", "--masks", "full"), 2, "give either --profile or these options"),
        (("a", "--cache-bytes", "-1"), 2, "--cache-bytes must be 0 or more"),
        (("a", "--min-p", "2", "-p", "x"), 2, "min_p must be a number of 0 to 1"),
        (("a", "--metric", "luck"), 2, "--metric must be one of"),
        (("a", "--masks", "-1"), 2, "--masks must be auto, full or a number of 0 or more, not `-1`"),
        (("a", "--masks", "wide"), 2, "--masks must be auto, full"),
        (("a", "--warp", "9"), 2, "no such option: --warp"),
        (("a", "--tau", "-1", "-p", "x"), 2, "tau must be a number of 0 or more"),
        (("/no/such/bundle", "-p", "x"), 1, "no such bundle"),
        (("a", "-p", "x", "-f", "y"), 2, "not both"),
        (("a", "-f", "/no/such/file"), 2, "not a readable file"),
        (("a", "--token-ids", "-p", "1 two"), 2, "whole numbers"),
    ],
)  # fmt: skip
def test_mars_run_used_wrongly(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
