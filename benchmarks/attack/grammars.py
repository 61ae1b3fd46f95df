"""Compiles hostile schemas, regexes, choices and tools. Allowed are only errors of mars-export: no hang, and
no memory beyond a bound.

PYTHONPATH=benchmarks python -m attack.grammars [--only NAME ...] [--state grammars.jsonl]

Each runs in a separate process that compiles it and, if that succeeds, follows an answer of a few tokens. It
prints the outcome, and the processor time and additional memory of compiling and of the most expensive step.
A failure ends the run with an error. No model is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MOST_SECONDS, MOST_STEP, MOST_BYTES, DEAD = 5.0, 0.5, 512 << 20, 60.0
ADDRESS_SPACE = 8 << 30
STEPS = 24  # of an answer that are walked
OURS = ("SessionError", "compiled")
Config = dict[str, Any]


def obj(properties: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def nested(depth: int) -> Any:
    value: Any = {"type": "integer"}
    for _ in range(depth):
        value = obj({"a": value}, required=["a"])
    return value


def doubling(levels: int) -> Any:
    """Each definition names the next one twice: 2**levels objects, once they are written out."""
    definitions: dict[str, Any] = {
        f"d{i}": obj(
            {"a": {"$ref": f"#/$defs/d{i + 1}"}, "b": {"$ref": f"#/$defs/d{i + 1}"}}, required=["a", "b"]
        )
        for i in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{levels}": {"type": "integer"}}}


def product(width: int, factors: int) -> Any:
    """allOf of anyOfs: width**factors cases."""
    return {
        "allOf": [{"anyOf": [obj({f"p{i}{j}": {"const": j}}) for j in range(width)]} for i in range(factors)]
    }


def function(i: int, properties: Any) -> Any:
    return {"type": "function", "function": {"name": f"f{i}", "parameters": obj(properties)}}


CASES: dict[str, Callable[[], Config]] = {
    "10,000 objects in one another, as text": lambda: {
        "schema": '{"properties":{"a":' * 10_000 + "{}" + "}}" * 10_000
    },
    "100,000 lists in one another, as text": lambda: {
        "schema": '{"enum":' + "[" * 100_000 + "]" * 100_000 + "}"
    },
    "as deep as is allowed": lambda: {"schema": nested(30)},
    "a regex of 1 MB": lambda: {"regex": "a" * 1_000_000},
    "a regex of 1 MB of alternatives": lambda: {"regex": "|".join(f"x{i}" for i in range(150_000))},
    "a regex of 2,000 alternatives": lambda: {"regex": "|".join(f"{i:x}" for i in range(450))},
    "a regex with {1,1000000}": lambda: {"regex": "[a-z]{1,1000000}"},
    "a regex with {1,10000}": lambda: {"regex": "[a-z]{1,10000}"},
    "repetitions of repetitions": lambda: {"regex": "(((a{100}){100}){100}){100}"},
    "repetitions below the bound": lambda: {"regex": "((a|b|ab){1,30}c){1,60}"},
    "a regex of nested stars": lambda: {"regex": "((((a*)*b*)*c*)*d*)*" * 20},
    "a regex that doubles states": lambda: {"regex": "(a|b)*a(a|b){20}"},
    "a regex that doubles many states": lambda: {"regex": "(a|b)*a(a|b){200}x(a|b)*b(a|b){200}"},
    "a regex of ambiguous words": lambda: {"regex": "(x+x+)+y" * 50},
    "a regex of all letters": lambda: {"regex": r"(\p{L}|\p{N}|\w){1,900}"},
    "a regex that nothing matches": lambda: {"regex": "[^\\s\\S]"},
    "a regex that is none": lambda: {"regex": "(" * 1000},
    "a regex with a look behind": lambda: {"regex": "(?<=a)b"},
    "no choices": lambda: {"choice": ()},
    "an empty choice": lambda: {"choice": ("",)},
    "10,000 choices": lambda: {"choice": tuple(f"c{i * 7919 % 10_007}" for i in range(10_000))},
    "choices of 1 MB": lambda: {"choice": ("a" * 1_000_000,)},
    "a choice as long as is allowed": lambda: {"choice": ("ab" * 49_000, "c")},
    "an enum of 10,000": lambda: {"schema": {"enum": [f"value {i * 7919 % 10_007}" for i in range(10_000)]}},
    "an enum of 100,000 numbers": lambda: {"schema": {"enum": list(range(100_000))}},
    "an enum of 1,000 objects": lambda: {"schema": {"enum": [{"a": [i, {"b": i}]} for i in range(1000)]}},
    "an empty enum": lambda: {"schema": {"enum": []}},
    "a constant of 900 kB": lambda: {"schema": {"const": "a b" * 300_000}},
    "a minLength of 1e9": lambda: {"schema": {"type": "string", "minLength": 10**9}},
    "a maxLength of 1e9": lambda: {"schema": {"type": "string", "maxLength": 10**9}},
    "lengths of 1e5": lambda: {"schema": {"type": "string", "minLength": 10**5, "maxLength": 2 * 10**5}},
    "a minItems of 1e9": lambda: {"schema": {"type": "array", "items": {"type": "null"}, "minItems": 10**9}},
    "a maxItems of 1e9": lambda: {"schema": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 10**9}},
    "items of 1e5 objects": lambda: {
        "schema": {"type": "array", "items": nested(3), "minItems": 10**5, "maxItems": 2 * 10**5}
    },
    "items of items": lambda: {
        "schema": {
            "type": "array",
            "maxItems": 5000,
            "items": {"type": "array", "maxItems": 5000, "items": {"type": "integer"}},
        }
    },
    "properties without an end": lambda: {"schema": {"type": "object", "minProperties": 10**9}},
    "numbers beyond all numbers": lambda: {
        "schema": f'{{"type": "integer", "minimum": 1{"0" * 4000}, "maximum": 2{"0" * 4000}}}'
    },
    "numbers of 300 digits": lambda: {"schema": {"type": "number", "minimum": -1e300, "maximum": 1e300}},
    "a multipleOf of 1e-300": lambda: {"schema": {"type": "number", "multipleOf": 1e-300}},
    "multiples of two primes": lambda: {
        "schema": {"type": "integer", "allOf": [{"multipleOf": 99_991}, {"multipleOf": 99_989}]}
    },
    "a reference to itself": lambda: {"schema": {"$ref": "#"}},
    "references in a circle": lambda: {
        "schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    },
    "all of itself": lambda: {"schema": {"allOf": [{"$ref": "#"}, {"type": "object"}]}},
    "any of itself": lambda: {"schema": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}, {"type": "null"}]}},
    "a tree": lambda: {
        "schema": obj({"left": {"$ref": "#"}, "right": {"$ref": "#"}, "value": {"type": "integer"}})
    },
    "a tree that cannot end": lambda: {"schema": obj({"next": {"$ref": "#"}}, required=["next"])},
    "a reference to nothing": lambda: {"schema": {"$ref": "#/$defs/none"}},
    "a reference to another file": lambda: {"schema": {"$ref": "file:///etc/passwd"}},
    "2**30 objects by reference": lambda: {"schema": doubling(30)},
    "8**6 cases": lambda: {"schema": product(8, 6)},
    "40**40 cases": lambda: {"schema": product(40, 40)},
    "1,000 optional properties": lambda: {
        "schema": obj({f"p{i}": {"type": "integer"} for i in range(1000)})
    },
    "10,000 required properties": lambda: {
        "schema": obj(
            {f"p{i}": {"type": "boolean"} for i in range(10_000)}, required=[f"p{i}" for i in range(10_000)]
        )
    },
    "patterns for names": lambda: {
        "schema": {
            "type": "object",
            "patternProperties": {f"^({'|'.join('abc')}){{{i + 1},{i + 40}}}$": {} for i in range(60)},
            "additionalProperties": False,
        }
    },
    "a pattern with {1,1000000}": lambda: {"schema": {"type": "string", "pattern": "^[a-c]{1,1000000}$"}},
    "patterns that meet": lambda: {
        "schema": {
            "allOf": [{"type": "string", "pattern": f"^(.*{c}.*){{1,40}}$"} for c in "abcdefgh"]
        }
    },
    "formats that meet": lambda: {
        "schema": {"allOf": [{"type": "string", "format": f} for f in ("email", "uri", "uuid", "date-time")]}
    },
    "a format that nobody knows": lambda: {"schema": {"type": "string", "format": "a" * 10_000}},
    "nothing at all": lambda: {"schema": False},
    "anything at all": lambda: {"schema": True},
    "not": lambda: {"schema": {"not": {"type": "string"}}},
    "1,000 tools": lambda: {
        "tools": [
            function(i, {f"a{j}": {"enum": ["v0", "v1", "v2"]} for j in range(4)}) for i in range(999)
        ]
    },
    "a tool of 1 MB": lambda: {
        "tools": [function(0, {f"a{j}": {"type": "string", "maxLength": 99} for j in range(15_000)})]
    },
    "names that are no names": lambda: {
        "tools": [{"type": "function", "function": {"name": 'a"}}]\n</tool_call>\x00' * 100}}]
    },
}  # fmt: skip


def walk(config: Config) -> dict[str, Any]:
    """Compile and walk one, in this process."""
    import numpy as np

    from attack.vocabulary import small_grammars
    from mars_export import GenerationConfig, SessionError
    from mars_export.runtime.machine import forget_peak, peak

    grammars = small_grammars()
    grammars.matcher(GenerationConfig(choice=("warm", "up"))).mask()
    forget_peak()
    before, begun, dearest, tokens = peak(), time.process_time(), 0.0, 0
    compiled = None
    try:
        matcher = grammars.matcher(GenerationConfig(**config))
        compiled = time.process_time() - begun
        while tokens < STEPS and not matcher.is_over:
            start = time.process_time()
            token = next(iter(matcher.forced()), None)
            if token is None:
                token = int(np.flatnonzero(matcher.mask())[tokens % 3 - 1 if tokens else 0])
            matcher.consume(token)
            tokens += 1
            dearest = max(dearest, time.process_time() - start)
        outcome, words = "compiled", ""
    except SessionError as error:
        outcome, words = "SessionError", str(error)
    except BaseException as error:
        outcome, words = type(error).__name__, str(error)
    return {
        "outcome": outcome,
        "words": words[:160],
        "length": len(words),
        "seconds": round(compiled if compiled is not None else time.process_time() - begun, 3),
        "step": round(dearest, 4),
        "tokens": tokens,
        "bytes": peak() - before,
    }


def trial(name: str) -> dict[str, Any]:
    """The outcome of one in a process of its own."""
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "attack.grammars", "--inside", name]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=DEAD, check=False)
    except subprocess.TimeoutExpired:
        return {"name": name, "outcome": "hang"}
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return {
            "name": name,
            "outcome": f"process ended with {done.returncode}",
            "words": "".join(last)[:160],
        }
    return {"name": name, **json.loads(done.stdout)}


def wrong(line: dict[str, Any]) -> list[str]:
    """What is wrong with an outcome."""
    bounds = {"seconds": MOST_SECONDS, "step": MOST_STEP, "bytes": MOST_BYTES, "length": 2000}
    return [
        *([line["outcome"]] if line["outcome"] not in OURS else []),
        *(f"{key} {line[key]}" for key, most in bounds.items() if line.get(key, 0) > most),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=CASES, metavar="NAME")
    parser.add_argument("--state", type=Path, help="JSON lines; what is in it is not done again")
    parser.add_argument("--inside", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        print(json.dumps(walk(CASES[args.inside]())))
        return 0
    lines = args.state.read_text().splitlines() if args.state is not None and args.state.exists() else []
    done = {line["name"]: line for line in map(json.loads, lines)}
    failures = 0
    for name in args.only or CASES:
        if name not in done:
            done[name] = trial(name)
            if args.state is not None:
                with args.state.open("a", encoding="utf-8") as state:
                    state.write(json.dumps(done[name]) + "\n")
        line = done[name]
        problems = wrong(line)
        failures += bool(problems)
        seconds, step, size = (line.get(key, 0) for key in ("seconds", "step", "bytes"))
        figures = f"{seconds:7.3f} s  step {step:7.4f} s  {size / 2**20:6.1f} MiB"
        told = f"WRONG: {', '.join(problems)} " if problems else ""
        print(f"{name:40} {line['outcome']:13} {figures}  {told}{line.get('words', '')}", flush=True)
    print(f"{len(done)} grammars, {failures} wrong")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
