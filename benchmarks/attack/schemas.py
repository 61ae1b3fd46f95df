"""Generates answers under random schemas with a random model, which mostly predicts tokens that are not
allowed. Every answer must parse and satisfy its schema by the jsonschema package.

PYTHONPATH=benchmarks python -m attack.schemas --state schemas.jsonl    # resumable; 200 schemas of 50 answers

A schema is a seed. The state has one JSON line for each. A failure is printed and ends the run with an error.
BUNDLE needs logits; without one, a small random model with bytes as tokens is created.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

from mars_export import GenerationConfig, Session
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from random_checkpoint import Shape, write_checkpoint

SMALL = Shape(64, 128, 2, 4, 2, 288, tie_word_embeddings=True)
MOST_TOKENS = 1000  # of an answer; every schema's answers are shorter


def drawn_schema(draw: random.Random, depth: int = 2) -> Any:
    """A schema whose answers all end."""
    kinds = ["string", "enum", "integer", "boolean", "null", "object", "array", "any"]
    kind = draw.choice(kinds[: 8 if depth else 5])
    if kind == "string":
        return {"type": "string", "maxLength": draw.randint(0, 5), "pattern": "^[a-c]*$"}
    if kind == "enum":
        return {"enum": [draw.choice([1, "x y", None, True, "é"]) for _ in range(draw.randint(1, 3))]}
    if kind == "integer":
        low = draw.randint(-20, 20)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 200)}
    if kind == "object":
        names = draw.sample(["a", "b", "name", "two words"], draw.randint(0, 3))
        return {
            "type": "object",
            "properties": {name: drawn_schema(draw, depth - 1) for name in names},
            "required": [name for name in names if draw.random() < 0.6],
            "additionalProperties": False,
        }
    if kind == "array":
        low = draw.randint(0, 2)
        items = drawn_schema(draw, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + draw.randint(0, 2)}
    if kind == "any":
        return {"anyOf": [drawn_schema(draw, depth - 1) for _ in range(2)]}
    return {"type": kind}


def small_bundle() -> Path:
    """A bundle of a random model that is made anew; it goes with the machine's other temporary files."""
    folder = Path(tempfile.mkdtemp(prefix="mars-schemas-"))
    write_checkpoint(folder / "checkpoint", SMALL)
    options = ExportOptions(block=4, logits=True, top_k=4, oracle=False)
    export_onnx(open_checkpoint(str(folder / "checkpoint")), folder / "bundle", options)
    return folder / "bundle"


def configs(draw: random.Random, schema: Any, number: int) -> Iterator[GenerationConfig]:
    """Exact, at a tau, drawn: what a row can be asked for under the schema."""
    for i in range(number):
        kind: dict[str, Any] = {} if i % 3 == 0 else {"tau": draw.choice((1.0, 0.9, 0.5, 0.0))}
        if i % 5 == 4:
            kind |= {"temperature": draw.choice((0.5, 3.0)), "seed": i}
        window: Any = draw.choice(("auto", "full", 1, 3))
        yield GenerationConfig(schema=schema, max_new_tokens=MOST_TOKENS, window=window, **kind)


def wrong(text: str, finish_reason: str, schema: Any) -> str | None:
    """What is wrong with an answer, if anything is."""
    if finish_reason != "eos":
        return f"ended by {finish_reason}: {text[:200]!r}"
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{text[:200]!r}: {str(error)[:200]}"
    return None


def trial(session: Session, seed: int, number: int, batch: int = 8) -> dict[str, Any]:
    """All answers to one schema, in batches of different configs."""
    draw = random.Random(seed)
    schema = drawn_schema(draw)
    manifest = session.bundle.manifest
    known = [i for i in range(manifest.model.vocab_size) if i != manifest.tokens.mask]
    asked = list(configs(draw, schema, number))
    prompts = [[draw.choice(known) for _ in range(draw.choice((1, 3, 9)))] for _ in asked]
    begun = time.perf_counter()
    answers = list(session.generate_each(prompts, asked, batch=batch))
    found = [wrong(answer.text, answer.finish_reason, schema) for answer in answers]
    return {
        "seed": seed,
        "answers": len(answers),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "wrong": [problem for problem in found if problem is not None],
        "seconds": round(time.perf_counter() - begun, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--answers", type=int, default=50, help="to each schema")
    parser.add_argument("--first", type=int, default=0, help="seed of the first schema")
    parser.add_argument("--state", type=Path, required=True)
    options = parser.parse_args()
    session = Session.open(options.bundle or small_bundle(), threads=1, cache_bytes=0)
    lines = options.state.read_text(encoding="utf-8").splitlines() if options.state.exists() else []
    done = {line["seed"]: line for line in map(json.loads, lines)}
    for seed in range(options.first, options.first + options.schemas):
        if seed in done:
            continue
        done[seed] = trial(session, seed, options.answers)
        with options.state.open("a", encoding="utf-8") as state:
            state.write(json.dumps(done[seed]) + "\n")
    problems = [f"seed {line['seed']}: {text}" for line in done.values() for text in line["wrong"]]
    answers, tokens = (sum(line[name] for line in done.values()) for name in ("answers", "tokens"))
    print(f"{len(done)} schemas, {answers} answers, {tokens} tokens, {len(problems)} wrong")
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
