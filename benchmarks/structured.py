"""The effect of a grammar on answers: the assistant's test rows with a schema of its tools, and without.

    python benchmarks/structured.py BUNDLE [--rows N] [--journal FILE] [--json FILE]

The bundle needs --top-k 16 and --logits. With a journal an interrupted run can be resumed. The
schema is derived from examples/default-checkpoint/intents.toml: one call a tool, its arguments those of the
tool's intents. For each setting: answers that parse and satisfy the schema (by the jsonschema package),
that are right, tokens per forward, and the share of forced tokens. Times are those of one process on a
machine that may be busy; --seconds prints them, and the share of the time that went into the grammar, once
it has seen ten rows. An answer that its max_new_tokens cut short is counted as cut. Ends with an error if
another one under the schema does not satisfy it.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from time import perf_counter
from typing import Any

import jsonschema
import tomllib

from mars_export import GenerationConfig, Session
from mars_export.calibration.journal import Journal
from mars_export.runtime.structured.guide import Guide
from mars_export.runtime.text.toolcalls import list_schema

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "default-checkpoint"
SETTINGS: dict[str, dict[str, Any]] = {
    "tau 1": {"tau": 1.0},
    "tau 0.95": {"tau": 0.95},
    "tau 0.8": {"tau": 0.8},
    "tau 0.5": {"tau": 0.5},
    "exact": {},
}


def calls(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield from json.loads(row["answer"])


def tools(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The assistant's tools: arguments from the intents, their types from the answers."""
    intents = tomllib.loads((EXAMPLE / "intents.toml").read_text(encoding="utf-8"))
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    arguments: dict[str, list[set[str]]] = defaultdict(list)
    free: set[tuple[str, str]] = set()
    for skill in intents["skill"]:
        for intent in skill["intent"]:
            name, given = intent["name"], intent.get("arguments", {})
            arguments[name].append(set(given))
            for key, value in given.items():
                values[name, key].add(value)
                if name == "ask" or "{" in value:
                    free.add((name, key))
    integers = {
        (call["name"], key)
        for call in calls(rows)
        for key, value in call["arguments"].items()
        if isinstance(value, int)
    }

    def schema(name: str, key: str) -> dict[str, Any]:
        if (name, key) in integers:
            return {"type": "integer"}
        return {"type": "string"} if (name, key) in free else {"enum": sorted(values[name, key])}

    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {key: schema(name, key) for key in ordered(name, values)},
                    "required": sorted(set.intersection(*sets)),
                    "additionalProperties": False,
                },
            },
        }
        for name, sets in arguments.items()
    ]


def ordered(name: str, values: dict[tuple[str, str], set[str]]) -> list[str]:
    """A tool's arguments in the order in which its intents name them."""
    return [key for tool, key in values if tool == name]


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


class Watch:
    """The time that goes into grammars while it is entered; one thread."""

    NAMES = ("forced", "append", "allowed", "choose", "lead")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_inside = False

    def __enter__(self) -> Watch:
        self._own = {name: getattr(Guide, name) for name in self.NAMES}
        for name, method in self._own.items():
            setattr(Guide, name, self._timed(method))
        return self

    def __exit__(self, *_: object) -> None:
        for name, method in self._own.items():
            setattr(Guide, name, method)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            if self._is_inside:
                return method(*args, **keywords)
            self._is_inside, began = True, perf_counter()
            try:
                return method(*args, **keywords)
            finally:
                self._is_inside = False
                self.seconds += perf_counter() - began

        return timed


def answered(session: Session, row: dict[str, Any], **asked: Any) -> dict[str, Any]:
    """One answer, as the journal keeps it."""
    with Watch() as watch:
        answer = session.generate(
            row["messages"], GenerationConfig(max_new_tokens=row["max_new_tokens"], **asked)
        )
    stats = answer.stats
    return {
        "text": answer.text,
        "tokens": stats.tokens,
        "forwards": stats.forwards,
        "forced": stats.forced,
        "seconds": stats.time_to_first_token + stats.decode_time,
        "decode_seconds": stats.decode_time,
        "grammar_seconds": watch.seconds,
    }


def summary(
    rows: list[dict[str, Any]], answers: list[dict[str, Any]], schema: dict[str, Any]
) -> dict[str, Any]:
    def total(name: str) -> float:
        return sum(answer[name] for answer in answers)

    valid = [is_valid(answer["text"], schema) for answer in answers]
    ended = [answer["tokens"] < row["max_new_tokens"] for answer, row in zip(answers, rows, strict=True)]
    return {
        "rows": len(rows),
        "valid": sum(valid),
        "cut": sum(not v and not e for v, e in zip(valid, ended, strict=True)),
        "right": sum(a["text"].strip() == row["answer"] for a, row in zip(answers, rows, strict=True)),
        "tokens": total("tokens"),
        "forwards": total("forwards"),
        "tokens_per_forward": total("tokens") / total("forwards"),
        "forced": total("forced") / total("tokens"),
        "seconds": total("seconds"),
        "tokens_per_second": total("tokens") / total("seconds"),
        "grammar": total("grammar_seconds") / total("seconds"),
        "texts": [answer["text"] for answer in answers],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rows", type=int, help="so many of the rows, evenly spread; all of them")
    parser.add_argument("--window", default="full", help="auto, full or a number; full repeats")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seconds", action="store_true")
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lines = (EXAMPLE / "data" / "assistant.test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    own_tools = tools(rows)
    schema = list_schema(own_tools)
    for row in rows:
        jsonschema.validate(json.loads(row["answer"]), schema)
    if options.rows:
        rows = [rows[i * len(rows) // options.rows] for i in range(options.rows)]
    session = Session.open(options.bundle, threads=options.threads)
    window = int(options.window) if options.window.isdecimal() else options.window
    print(f"{len(own_tools)} tools, {len(rows)} rows, window {window}")
    identity = {
        "bundle": (options.bundle / "manifest.sha256").read_text(encoding="utf-8"),
        "rows": len(rows),
        "window": window,
    }
    path = options.journal or Path(mkdtemp()) / "journal.jsonl"
    journal = Journal.open(path, identity, resume=True, force=False)
    for row in rows[:10]:  # what is done once for a tokenizer and a grammar belongs to no row
        session.generate(row["messages"], GenerationConfig(tau=0.8, schema=schema, window=window))
    results, broken = {}, 0
    for name in options.settings:
        for kind, constraint in (("plain", {}), ("schema", {"schema": schema})):
            answers = []
            for i, row in enumerate(rows):
                if (key := f"{name}, {kind}, {i}") not in journal:
                    journal[key] = answered(session, row, window=window, **SETTINGS[name], **constraint)
                answers.append(journal[key])
            results[f"{name}, {kind}"] = found = summary(rows, answers, schema)
            broken += len(rows) - found["valid"] - found["cut"] if constraint else 0
            seconds = f"  {found['seconds']:.1f} s, grammar {found['grammar']:.1%}" if options.seconds else ""
            print(
                f"{name:9} {kind:7} valid {found['valid']:3}  cut {found['cut']:2}  right {found['right']:3}"
                f"  tokens/forward {found['tokens_per_forward']:5.2f} forced {found['forced']:6.1%}{seconds}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if broken:
        raise SystemExit(f"{broken} answers under the schema do not satisfy it")


if __name__ == "__main__":
    main()
