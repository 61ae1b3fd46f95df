"""A model card of a bundle: what it was made from, how far it is from that, and how to use it. Markdown, in
which words of the bundle stay words. Knows no hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from .bundle.manifest import Manifest, Profile, Variant
from .bundle.open import HUB_ID

MARK = "<!-- written by mars-export; a card without this line is left as it is -->"
SPECIAL = re.compile(r"[\\`*_{}\[\]<>()#|~&$!@:^=]")


def plain(text: object) -> str:
    """Text that Markdown and HTML show as it stands, on one line."""
    shown = "".join(c if c.isprintable() else " " for c in str(text))
    return SPECIAL.sub(lambda found: "\\" + found[0], shown)


def card(manifest: Manifest, repo: str, licence: str | None = None) -> str:
    """The card of a bundle that lies at `repo`; `licence` is an identifier such as `apache-2.0`."""
    name = repo.rpartition("/")[2]
    parts = [
        _front(manifest, licence),
        MARK,
        f"# {plain(name)}",
        f"A bundle of mars-export ({plain(manifest.producer)}, format {plain(manifest.format_version)}): an"
        " ONNX step graph that accepts several tokens in one forward, made from"
        f" {_origin(manifest)}{_revision(manifest)}.",
        "```\n"
        f"mars-export pull {repo} -o {name}.bundle\n"
        f"mars-export chat {name}.bundle\n"
        f"mars-export generate {name}.bundle --prompt 'Hello'\n"
        "```",
        "## Model",
        _table(("", ""), _model(manifest)),
        "## Variants, and what the export's self-check found",
        _table(
            (
                "variant",
                "backend",
                "weights",
                "KV entries",
                "largest logit error",
                "same token",
                "checked by",
            ),
            map(_variant, manifest.variants),
        ),
    ]
    if manifest.profiles:
        parts += [
            "## Calibrated profiles",
            _table(
                ("profile", "tau", "on", "task", "rows", "quality may drop by"),
                map(_profile, manifest.profiles),
            ),
        ]
    if manifest.prefixes:
        rows = [(p.name, p.length, p.variant, p.device) for p in manifest.prefixes]
        parts += [
            "## Stored beginnings of prompts",
            _table(("prefix", "tokens", "variant", "device"), rows),
        ]
    parts += ["## Licence", _licence(manifest, licence)]
    return "\n\n".join(parts) + "\n"


def _front(manifest: Manifest, licence: str | None) -> str:
    """The card's head. Values are JSON strings, which YAML reads as they are."""
    lines = ["---", "library_name: mars-export", "pipeline_tag: text-generation"]
    if licence is not None:
        lines.append(f"license: {json.dumps(licence)}")
    if HUB_ID.fullmatch(manifest.source):
        lines.append(f"base_model: {json.dumps(manifest.source)}")
    backends = sorted({v.backend for v in manifest.variants})
    lines += ["tags:", *(f"- {json.dumps(tag)}" for tag in ("mars-export", "multi-token", *backends)), "---"]
    return "\n".join(lines)


def _origin(manifest: Manifest) -> str:
    """The source without the folders of whoever exported it."""
    source = manifest.source
    return plain(source if HUB_ID.fullmatch(source) else re.split(r"[/\\]", source.rstrip("/\\"))[-1])


def _revision(manifest: Manifest) -> str:
    return "" if manifest.revision is None else f" at revision {plain(manifest.revision)}"


def _model(manifest: Manifest) -> list[tuple[object, ...]]:
    m = manifest.model
    return [
        ("architecture", m.type),
        ("layers", m.num_layers),
        ("hidden size", m.hidden_size),
        ("heads", f"{m.num_heads}, {m.num_kv_heads} of keys and values, {m.head_dim} wide"),
        ("vocabulary", m.vocab_size),
        ("context", m.context_length),
        ("predictions of a full step", manifest.block),
    ]


def _variant(v: Variant) -> tuple[object, ...]:
    drift = ("", "not checked", "")
    if v.drift is not None:
        drift = (
            f"{v.drift.max_logit_error:.1e}",
            f"{v.drift.argmax_matches} of {v.drift.positions}",
            v.drift.yardstick or "the exporter",
        )
    weights = v.precision
    if v.quantization is not None:
        q = v.quantization
        weights += f", groups of {q.group_size}" if q.group_size else ", one scale a channel"
        weights += f", lm_head {q.head}, embedding {q.embedding}"
    return v.name, v.backend, weights, v.kv_dtype, *drift


def _profile(p: Profile) -> tuple[object, ...]:
    known = [p.evidence.get(key, "?") for key in ("task", "num_rows", "max_drop")]
    return p.name, f"{p.tau:g} ({p.metric})", p.variant, *known


def _licence(manifest: Manifest, licence: str | None) -> str:
    origin = _origin(manifest)
    if licence is None:
        return f"Not stated. The weights were made from {origin}; its licence holds for them."
    return f"{plain(licence)}, as whoever pushed it says. The weights were made from {origin}."


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(plain(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)
