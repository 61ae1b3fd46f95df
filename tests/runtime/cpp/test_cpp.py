"""The C++ runtime against the Python one on tiny bundles: tokens, events and errors, one for one."""

from __future__ import annotations

import ctypes as c
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.cabi import WINDOWS, CSession, Library, MarsStatusError, build
from support.fixtures import Named, Sessions
from typer.testing import CliRunner

from mars_export.cli import app
from mars_export.runtime import BundleError, Commit, GenerationConfig
from mars_export.runtime.bundle.files import describe
from mars_export.runtime.bundle.open import open_bundle, write_manifest

PROMPT = [5, 9, 200, 17]
BLOCK = 6  # of the test bundles
PYTHON_ONLY: tuple[str, ...] = ()
TAUS = (1.0, 0.7, 0.4, 0.0)
MODES = ({}, {"tau": 1.0}, {"tau": 0.4})
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "seed": 2**63 + 1},
    {"repetition_penalty": 1.4},
)


@pytest.fixture(scope="module")
def twin(library: Library, bundles: Named) -> Iterator[CSession]:
    with CSession(library, bundles("llama"), threads=1) as session:
        yield session


@pytest.mark.parametrize(("commit", "tau"), list(product(("cursor", "block"), TAUS)))
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_tokens_are_those_of_python(
    commit: str, tau: float, sampling: dict[str, Any], twin: CSession, sessions: Sessions
) -> None:
    for metric, prompt in product(("probability", "margin", "entropy"), (PROMPT, list(range(1, 40)))):
        config = GenerationConfig(tau=tau, metric=metric, max_new_tokens=24, eos_ids=(), **sampling)
        wanted = sessions("llama").generate(prompt, config, commit=Commit(commit, 7))
        made = twin.generate(
            prompt,
            commit=commit,
            cache_block=7,
            tau=tau,
            metric=metric,
            max_new_tokens=24,
            eos_ids=(),
            **sampling,
        )
        assert made.token_ids == wanted.token_ids
        assert made.finish_reason == wanted.finish_reason
        assert made.confidences == pytest.approx(wanted.confidences, abs=1e-5)
        assert (made.forwards, made.prefill_forwards) == (
            wanted.stats.forwards,
            wanted.stats.prefill_forwards,
        )
        assert {k: n for k, n in enumerate(made.accepted) if n} == wanted.stats.accepted


@pytest.mark.parametrize("window", [1, 2, 5, 6, 100, "full"])
def test_windows(window: int | str, twin: CSession, sessions: Sessions) -> None:
    width = BLOCK if window == "full" else window
    wanted = sessions("llama").generate(
        PROMPT, GenerationConfig(tau=0.0, max_new_tokens=24, eos_ids=(), window=int(width))
    )
    made = twin.generate(PROMPT, tau=0.0, max_new_tokens=24, eos_ids=(), window=window)
    assert (made.token_ids, made.forwards) == (wanted.token_ids, wanted.stats.forwards)
    assert max(k for k, n in enumerate(made.accepted) if n) == min(int(width), BLOCK)


def test_the_automatic_window_is_the_default_and_never_wider_than_a_block(twin: CSession) -> None:
    config = twin.library.config({})
    twin.library.c.mars_config_init(c.byref(config), c.sizeof(config))
    assert config.window == WINDOWS["auto"] == 0
    made = twin.generate(PROMPT, tau=0.0, max_new_tokens=40, eos_ids=(), window="auto")
    assert len(made.token_ids) == 40 and len(made.accepted) <= BLOCK + 1


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3-mixed"])
def test_long_prompts_and_full_contexts(
    name: str, library: Library, bundles: Named, sessions: Sessions
) -> None:
    draw = random.Random(name)
    with CSession(library, bundles(name), threads=1) as twin:
        for length, commit in product((255, 257, 505, 512), ("cursor", "block")):
            prompt = [draw.randrange(tiny.NUM_BYTES) for _ in range(length)]
            wanted = sessions(name).generate(
                prompt, GenerationConfig(tau=0.3, max_new_tokens=20, eos_ids=()), commit=Commit(commit)
            )
            made = twin.generate(prompt, commit=commit, tau=0.3, max_new_tokens=20, eos_ids=())
            assert (made.token_ids, made.finish_reason) == (wanted.token_ids, wanted.finish_reason)
            assert (made.forwards, made.prefill_forwards) == (
                wanted.stats.forwards,
                wanted.stats.prefill_forwards,
            )


@pytest.mark.parametrize("commit", ["cursor", "block"])
def test_rows_of_one_batch(commit: str, twin: CSession, sessions: Sessions) -> None:
    prompts = [PROMPT, [i % 250 for i in range(290)], [7], [8] * 30]
    settings = [
        {"tau": t, "max_new_tokens": n, "temperature": h, "eos_ids": ()}
        for t, n, h in ((0.4, 30, 0), (1, 9, 0), (0, 50, 1), (0.6, 1, 0))
    ]
    wanted = sessions("llama").generate_batch(
        prompts, [GenerationConfig(**s) for s in settings], commit=Commit(commit)
    )  # type: ignore[arg-type]
    made = twin.generate_batch(prompts, [{**s, "commit": commit} for s in settings])
    assert [m.token_ids for m in made] == [w.token_ids for w in wanted]
    assert [m.finish_reason for m in made] == [w.finish_reason for w in wanted]


@pytest.mark.parametrize("stop", [(), ("e",), ("he", "an"), ("never",)])
def test_texts_and_stop_strings(stop: tuple[str, ...], twin: CSession, sessions: Sessions) -> None:
    python = sessions("llama")
    chat = [{"role": "user", "content": "the é 🙂"}]
    for prompt, tau in product(("hello the anon", chat), (None, 1.0, 0.3)):
        assert twin.encode(prompt) == python.encode(prompt)
        stream = python.stream(prompt, GenerationConfig(tau=tau, max_new_tokens=40, stop=stop, window="full"))
        wanted = [(e.text, list(e.token_ids), e.finish_reason) for e in stream]
        twin_stream = twin.stream(prompt, tau=tau, max_new_tokens=40, stop=stop)
        assert list(iter(twin_stream.next, None)) == wanted
        assert twin_stream.completion().text == stream.completion.text
        twin_stream.close()
    assert twin.decode(twin.encode("hello the é")) == "hello the é"


def test_a_stream_takes_a_new_tau_and_is_cancelled(twin: CSession, sessions: Sessions) -> None:
    stream = sessions("llama").stream(PROMPT, GenerationConfig(tau=1, max_new_tokens=30, eos_ids=()))
    twin_stream = twin.stream(PROMPT, tau=1, max_new_tokens=30, eos_ids=())
    runs = []
    for event in stream:
        runs.append(event.token_ids)
        made = twin_stream.next()
        assert made is not None and tuple(made[1]) == event.token_ids
        tau = (1.0, 0.2, 0.0)[len(runs) % 3]
        stream.tau = tau
        twin_stream.set_tau(tau)
        assert twin_stream.tau == tau
        if len(runs) == 6:
            stream.cancel()
            twin_stream.cancel()
    assert twin_stream.next() is None
    assert twin_stream.completion().finish_reason == stream.completion.finish_reason == "cancelled"
    with pytest.raises(MarsStatusError, match="tau must be a number of 0 or more"):
        twin_stream.set_tau(float("nan"))
    twin_stream.close()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("window", ["full", "auto", 1, 3])
def test_exact_text_is_that_of_one_token_and_of_python(
    window: int | str, sampling: dict[str, Any], twin: CSession, sessions: Sessions
) -> None:
    for prompt, eos, metric in product(
        (PROMPT, list(range(1, 40))), ((), (7, 100, 101, 102)), ("probability", "entropy")
    ):
        asked = {"max_new_tokens": 40, "eos_ids": eos, "metric": metric, **sampling}
        one = twin.generate(prompt, tau=0.0 if metric == "entropy" else 1.0, **asked)
        made = twin.generate(prompt, window=window, **asked)
        assert (made.token_ids, made.finish_reason) == (one.token_ids, one.finish_reason)
        assert made.proposed == made.verified + made.rejected and made.forwards <= one.forwards
        if window == "auto":  # follows measured times here, and none in Python's tests
            continue
        config = GenerationConfig(window=window, **asked)  # type: ignore[arg-type]
        wanted = sessions("llama").generate(prompt, config)
        stats = wanted.stats
        assert made.token_ids == wanted.token_ids
        assert made.confidences == pytest.approx(wanted.confidences, abs=1e-5)
        assert (made.forwards, made.proposed, made.verified) == (
            stats.forwards,
            stats.proposed,
            stats.verified,
        )
        assert {k: n for k, n in enumerate(made.accepted) if n} == stats.accepted


def test_exact_rows_beside_rows_at_a_tau(twin: CSession, sessions: Sessions) -> None:
    prompts = [PROMPT, [i % 250 for i in range(290)], [7], [8] * 30, [8] * 500]
    settings: list[dict[str, Any]] = [
        {"max_new_tokens": n, "eos_ids": (), "window": "full", **mode}
        for n, mode in zip(
            (30, 9, 50, 20, 40), (*MODES, {"temperature": 1, "seed": 5}, {"lookup": 2}), strict=True
        )
    ]
    wanted = sessions("llama").generate_batch(prompts, [GenerationConfig(**s) for s in settings])
    made = twin.generate_batch(prompts, settings)
    assert [m.token_ids for m in made] == [w.token_ids for w in wanted]
    assert [m.finish_reason for m in made] == [w.finish_reason for w in wanted]
    assert sum(m.proposed for m in made) > 0 and made[1].proposed == made[2].proposed == 0


def test_a_stream_goes_into_exact_mode_and_out_of_it(twin: CSession, sessions: Sessions) -> None:
    stream = sessions("llama").stream(PROMPT, GenerationConfig(max_new_tokens=40, eos_ids=(), window="full"))
    twin_stream = twin.stream(PROMPT, max_new_tokens=40, eos_ids=())
    assert twin_stream.tau is None
    for count, event in enumerate(stream):
        made = twin_stream.next()
        assert made is not None and tuple(made[1]) == event.token_ids
        tau = (None, None, 0.2, 0.0)[count % 4]
        if tau is None:
            stream.exact = True
        else:
            stream.tau = tau
        twin_stream.set_tau(tau)
        assert twin_stream.tau == stream.tau == tau
    assert twin_stream.next() is None
    made_stats = twin_stream.completion()
    assert (made_stats.proposed, made_stats.verified) == (stream.stats.proposed, stream.stats.verified)
    assert made_stats.proposed > 0
    twin_stream.close()


def test_a_draft_proposes_and_must_have_the_same_tokenizer(
    library: Library, bundles: Named, twin: CSession, tmp_path: Path
) -> None:
    wanted = twin.generate(PROMPT, tau=1.0, max_new_tokens=40, eos_ids=())
    with CSession(library, bundles("llama"), threads=1, draft=str(bundles("llama"))) as drafted:
        made = drafted.generate(PROMPT, window=1, max_new_tokens=40, eos_ids=())
        one = drafted.generate(PROMPT, tau=1.0, max_new_tokens=40, eos_ids=())
    assert made.token_ids == one.token_ids == wanted.token_ids
    assert made.forwards < wanted.forwards and made.proposed > 0 and one.proposed == 0
    other = tmp_path / "bundle"
    shutil.copytree(bundles("llama"), other, ignore=shutil.ignore_patterns(".*"))
    manifest, path = open_bundle(other).manifest, other / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")
    write_manifest(other, replace(manifest, files=tuple(describe(other / e.path) for e in manifest.files)))
    with pytest.raises(MarsStatusError, match="the draft has another tokenizer than .*of one family"):
        CSession(library, bundles("llama"), draft=str(other))


def test_a_callback_stops_an_answer(twin: CSession) -> None:
    seen: list[int] = []
    made = twin.generate(
        PROMPT,
        lambda event: bool(seen.extend(event.token_ids[: event.num_tokens])) or len(seen) >= 3,
        tau=1,
        eos_ids=(),
    )
    assert made.finish_reason == "cancelled"
    assert list(made.token_ids) == seen and len(seen) == 3


def test_requests_that_cannot_be_served(twin: CSession) -> None:
    for prompt, config, message in (
        ([], {}, "the prompt is empty"),
        ([tiny.VOCAB_SIZE], {}, f"outside the vocabulary of {tiny.VOCAB_SIZE}: {tiny.VOCAB_SIZE}"),
        ([1] * 513, {}, "the prompt has 513 tokens, this bundle's context holds 512"),
        ([1], {"tau": -2.0, "top_k": -1}, "tau must be .*; top_k must be"),
        ([1], {"commit": "block"}, "exact mode needs cursor commit: .*leave commit as it is, or give a tau"),
        ([1], {"lookup": -1}, "lookup must be an integer of 0 or more"),
        ([1], {"window": -2}, "window must be auto, full or an integer of 1 or more"),
        ([1], {"tau": 1, "commit": "block", "cache_block": 0}, "cache_block must be 1 or more"),
        ([{"role": "judge", "content": "x"}], {}, "judge"),
    ):
        with pytest.raises(MarsStatusError, match=message) as error:
            twin.generate(prompt, **config)
        assert error.value.status == 2


def test_devices_by_name(library: Library, bundles: Named) -> None:
    for device in ("CPU", "cpuexecutionprovider", "CPUExecutionProvider"):
        with CSession(library, bundles("llama"), device=device, threads=1):
            pass
    for device, words in (("cpu:0", "the CPU has no number"), ("cuda:", "behind the colon stands a GPU's")):
        with pytest.raises(MarsStatusError, match=words):
            CSession(library, bundles("llama"), device=device)
    with pytest.raises(MarsStatusError, match=r"has no device `tpu` \(it has: .*CPUExecutionProvider"):
        CSession(library, bundles("llama"), device="tpu")
    with pytest.raises(MarsStatusError, match="no variant `x`"):
        CSession(library, bundles("llama"), variant="x")


def broken_bundles(directory: Path, other: Path) -> Iterator[str]:
    """Break the bundle in one way after the other; every file is whole again after each yield."""
    draw = random.Random(5)
    for name in ("model.onnx", "tokenizer.json", "weights.bin", "manifest.json", "manifest.sha256"):
        path = directory / name
        whole = path.read_bytes()
        flips = []
        for _ in range(60):
            changed = bytearray(whole)
            for place in draw.sample(range(len(whole)), 2):
                changed[place] ^= 1 << draw.randrange(8)
            flips.append(bytes(changed))
        cuts = [whole[: draw.randrange(len(whole))] for _ in range(30)]
        for data in [
            b"",
            whole[:-1],
            whole * 2,
            bytes(len(whole)),
            (other / name).read_bytes(),
            *cuts,
            *flips,
        ]:
            path.write_bytes(data)
            yield name
        path.unlink()
        yield f"{name} missing"
        path.mkdir()
        yield f"a directory for {name}"
        path.rmdir()
        path.write_bytes(whole)


def test_corrupted_bundles_end_in_an_error_code(library: Library, bundles: Named, tmp_path: Path) -> None:
    directory = tmp_path / "bundle"
    shutil.copytree(bundles("llama"), directory, ignore=shutil.ignore_patterns(".*"))
    count = 0
    for what in broken_bundles(directory, bundles("qwen3")):
        count += 1
        try:
            open_bundle(directory)
        except BundleError:
            with pytest.raises(MarsStatusError) as error:
                CSession(library, directory, threads=1)
            assert error.value.status == 1, what
    assert count > 400
    with CSession(library, directory, threads=1, verify="always") as session:
        assert session.generate([1], max_new_tokens=2).token_ids


def test_files_that_are_hashed_but_wrong(library: Library, bundles: Named, tmp_path: Path) -> None:
    """Hashes that are right over files that are not: readers behind the manifest's must stand it too."""
    directory = tmp_path / "bundle"
    shutil.copytree(bundles("llama"), directory, ignore=shutil.ignore_patterns(".*"))
    manifest, draw = open_bundle(directory).manifest, random.Random(6)
    for name in ("model.onnx", "tokenizer.json"):
        whole = (directory / name).read_bytes()
        for i in range(40):
            changed = bytearray(whole)
            for place in draw.sample(
                range(len(whole)), 3 if name == "tokenizer.json" else 0
            ):  # a graph's values are ONNX Runtime's to check
                changed[place] = draw.randrange(256)
            (directory / name).write_bytes(changed if i % 2 else changed[: draw.randrange(len(whole))])
            write_manifest(
                directory,
                replace(manifest, files=tuple(describe(directory / e.path) for e in manifest.files)),
            )
            status = 0
            try:
                with CSession(library, directory, threads=1) as session:
                    session.generate([1, 2], max_new_tokens=3)
            except MarsStatusError as error:
                status = error.status
            assert status in (0, 1, 2)
        (directory / name).write_bytes(whole)


def test_a_tokenizer_it_does_not_know_leaves_token_ids(
    library: Library, bundles: Named, tmp_path: Path
) -> None:
    directory = tmp_path / "bundle"
    shutil.copytree(bundles("llama"), directory, ignore=shutil.ignore_patterns(".*"))
    manifest, path = open_bundle(directory).manifest, directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["model"]["type"] = "WordPiece"
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    write_manifest(
        directory, replace(manifest, files=tuple(describe(directory / e.path) for e in manifest.files))
    )
    with (
        CSession(library, directory, threads=1) as session,
        CSession(library, bundles("llama"), threads=1) as twin,
    ):
        assert (session.has_text, twin.has_text) == (False, True)
        made = session.generate(PROMPT, tau=0.4, max_new_tokens=12)
        wanted = twin.generate(PROMPT, tau=0.4, max_new_tokens=12)
        assert (made.token_ids, made.text) == (wanted.token_ids, "")
        for ask in (
            lambda: session.generate("words"),
            lambda: session.generate([{"role": "user", "content": "x"}]),
            lambda: session.generate(PROMPT, stop=["x"]),
            lambda: session.decode([1, 2]),
        ):
            with pytest.raises(
                MarsStatusError, match=r"only BPE is supported, not `WordPiece`(.|\n)*token ids"
            ):
                ask()


def test_stamps_lie_with_the_user_and_never_in_the_bundle(
    library: Library, bundles: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARS_EXPORT_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "bundle"
    shutil.copytree(bundles("llama"), directory, ignore=shutil.ignore_patterns(".*"))
    names = {path.name for path in directory.iterdir()}
    with CSession(library, directory, threads=1):
        pass
    (file,) = (tmp_path / "cache" / "verified").iterdir()
    theirs, state = file.read_bytes(), file.stat()
    monkeypatch.setattr("mars_export.runtime.bundle.files.sha256_of", lambda _: pytest.fail("hashed again"))
    manifest = open_bundle(directory).manifest
    assert json.loads(theirs).keys() == {entry.path for entry in manifest.files}
    assert file.stat() == state, "Python believes it as it stands"
    monkeypatch.undo()
    monkeypatch.setenv("MARS_EXPORT_CACHE", str(tmp_path / "cache"))
    file.unlink()
    open_bundle(directory)
    assert json.loads(file.read_bytes()) == json.loads(theirs), "and says the same"
    assert {path.name for path in directory.iterdir()} == names


def run(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [build() / "mars-run", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120)


def test_mars_run_is_the_twin_of_generate(bundles: Named, sessions: Sessions, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("the éclair")
    options = ("--tau", 0.4, "--window", "full", "--max-new-tokens", 20, "--threads", 1, "--json")
    chat = [{"role": "user", "content": "the éclair"}]
    wanted = sessions("llama").generate(chat, GenerationConfig(tau=0.4, max_new_tokens=20, window="full"))
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
        words = [word for word in wanted.stats.to_dict() if word not in PYTHON_ONLY]
        assert list(made["stats"]) == words
        assert made["stats"]["accepted"] == wanted.stats.to_dict()["accepted"]
    exact = sessions("llama").generate(chat, GenerationConfig(max_new_tokens=20, window="full", lookup=2))
    for words in ((), ("--exact",), ("--draft", bundles("llama")), ("--lookup", 2)):
        done = run(bundles("llama"), "-p", "the éclair", *words, "--max-new-tokens", 20, "--json")
        made = json.loads(done.stdout)
        assert made["token_ids"] == list(exact.token_ids)
        assert (made["exact"], made["tau"]) == (True, None)
        assert made["stats"]["proposed"] == made["stats"]["verified"] + made["stats"]["rejected"] > 0
    for words, window in (
        (("--seed", 7), "full"),
        (("--temperature", 1), "full"),
        (("--seed", 7, "--window", "auto"), "auto"),
        (("--seed", 7, "--window", 2), 2),
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
        assert made["window"] == expected["window"] == window, words
        if window == "full":
            assert made["token_ids"] == expected["token_ids"], words
    shown = run(
        bundles("llama"), "--raw", "--prompt=the éclair", "--tau=0.4", "--window=full", "--max-new-tokens=20"
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
        ((), 2, "which BUNDLE?"),
        (("a", "b"), 2, "there is also `b`"),
        (("a", "--tau"), 2, "--tau needs a value"),
        (("a", "--tau", "much"), 2, "--tau needs a number, not `much`"),
        (("a", "--max-new-tokens", "0"), 2, "--max-new-tokens must be 1 or more"),
        (("a", "--seed", "-1"), 2, "--seed needs a number"),
        (
            ("a", "--tau", "0.9", "--exact"),
            1,
            "--exact gives the one-token text whatever is likely, --tau 0.9 accepts",
        ),
        (("a", "--metric", "margin"), 1, "--metric margin says what tau is compared with; give --tau, too"),
        (("a", "--lookup", "-1"), 2, "--lookup must be 0 or more"),
        (("a", "--profile", "x", "--tau", "1"), 1, "give --profile, or them, not both"),
        (("a", "--profile", "x", "--window", "full"), 1, "give --profile, or them, not both"),
        (("a", "--cache-bytes", "-1"), 2, "--cache-bytes must be 0 or more"),
        (("a", "--min-p", "2", "-p", "x"), 1, "min_p must be a number of 0 to 1"),
        (("a", "--metric", "luck"), 2, "--metric must be one of"),
        (("a", "--window", "0"), 2, "--window must be auto, full or a number of 1 or more, not `0`"),
        (("a", "--window", "-1"), 2, "--window must be auto, full"),
        (("a", "--warp", "9"), 2, "no such option: --warp"),
        (("a", "--tau", "-1", "-p", "x"), 1, "tau must be a number of 0 or more"),
        (("/no/such/bundle", "-p", "x"), 1, "no such bundle"),
        (("a", "-p", "x", "-f", "y"), 1, "not both"),
        (("a", "-f", "/no/such/file"), 1, "not a readable file"),
        (("a", "--token-ids", "-p", "1 two"), 1, "whole numbers"),
    ],
)
def test_mars_run_used_wrongly(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr


@pytest.mark.parametrize("preset", ["release", "asan", "tsan"])
def test_many_threads_on_one_session(preset: str, bundles: Named) -> None:
    done = subprocess.run(
        [build(preset) / "tests" / "mars-load", bundles("llama"), "4", "5"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong answers" in done.stdout
