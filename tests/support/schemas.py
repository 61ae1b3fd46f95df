"""Random schemas, and answers under them, which must satisfy the schema by the jsonschema package."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema

from mars_export import GenerationConfig, Session

MAX_TOKENS = 1000  # of an answer; every schema's answers are shorter


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


def configs(draw: random.Random, schema: Any, number: int) -> Iterator[GenerationConfig]:
    """Exact, at a tau, drawn: what a row can be asked for under the schema."""
    for i in range(number):
        kind: dict[str, Any] = {} if i % 3 == 0 else {"tau": draw.choice((1.0, 0.9, 0.5, 0.0))}
        if i % 5 == 4:
            kind |= {"temperature": draw.choice((0.5, 3.0)), "seed": i}
        masks: Any = draw.choice(("auto", "full", 0, 2))
        yield GenerationConfig(schema=schema, max_new_tokens=MAX_TOKENS, masks=masks, **kind)


def wrong(text: str, finish_reason: str, schema: Any) -> str | None:
    """What is wrong with an answer, if anything is."""
    if finish_reason != "eos":
        return f"ended by {finish_reason}: {text[:200]!r}"
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{text[:200]!r}: {str(error)[:200]}"
    return None


def wrong_answers(session: Session, seed: int, number: int, batch: int = 8) -> list[str]:
    """What is wrong with `number` answers to the schema of a seed, in batches of different configs."""
    draw = random.Random(seed)
    schema = drawn_schema(draw)
    manifest = session.bundle.manifest
    known = [i for i in range(manifest.model.vocab_size) if i != manifest.tokens.mask]
    asked = list(configs(draw, schema, number))
    prompts = [[draw.choice(known) for _ in range(draw.choice((1, 3, 9)))] for _ in asked]
    answers = list(session.generate_each(prompts, asked, batch=batch))
    assert len(answers) == number
    return [problem for a in answers if (problem := wrong(a.text, a.finish_reason, schema)) is not None]
