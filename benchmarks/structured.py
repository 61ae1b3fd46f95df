"""What a grammar does to answers: the assistant's test rows under a schema of its tools, and without.

    python benchmarks/structured.py BUNDLE [--rows N] [--json FILE]

The bundle needs --top-k or --logits. The schema is derived from examples/default-checkpoint/intents.toml: one
call a tool, its arguments those of the tool's intents. For each setting: answers that parse and satisfy the
schema (by the jsonschema package), that are right, tokens per forward, and the share of forced tokens.
Times are those of one process on a machine that may be busy; --seconds prints them.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import tomllib

from mars_export.runtime import GenerationConfig, Session
from mars_export.runtime.toolcalls import list_schema

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


def measured(session: Session, rows: list[dict[str, Any]], **asked: Any) -> dict[str, Any]:
    """One setting over all rows; `schema` constrains where it is given."""
    schema = asked.pop("judge")
    answers = [
        session.generate(row["messages"], GenerationConfig(max_new_tokens=row["max_new_tokens"], **asked))
        for row in rows
    ]
    stats = [answer.stats for answer in answers]
    tokens, forwards = sum(s.tokens for s in stats), sum(s.forwards for s in stats)
    return {
        "rows": len(rows),
        "valid": sum(is_valid(answer.text, schema) for answer in answers),
        "right": sum(a.text.strip() == row["answer"] for a, row in zip(answers, rows, strict=True)),
        "tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": tokens / forwards,
        "forced": sum(s.forced for s in stats) / tokens,
        "seconds": sum(s.time_to_first_token + s.decode_time for s in stats),
        "texts": [answer.text for answer in answers],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rows", type=int, help="so many of the rows, evenly spread; all of them")
    parser.add_argument("--window", default="full", help="auto, full or a number; full repeats")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seconds", action="store_true")
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
    results = {}
    for name in options.settings:
        for kind, constraint in (("plain", {}), ("schema", {"schema": schema})):
            found = measured(session, rows, judge=schema, window=window, **SETTINGS[name], **constraint)
            results[f"{name}, {kind}"] = found
            seconds = f"  {found['seconds']:.1f} s" if options.seconds else ""
            print(
                f"{name:9} {kind:7} valid {found['valid']:3}  right {found['right']:3}"
                f"  tokens/forward {found['tokens_per_forward']:5.2f} forced {found['forced']:6.1%}{seconds}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
