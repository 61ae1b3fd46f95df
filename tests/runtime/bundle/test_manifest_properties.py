"""Any manifest is read as it was written; anything else is refused, and nothing worse."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.manifests import GOOD, HASH

from mars_export import BundleError
from mars_export.runtime.bundle.files import FileEntry
from mars_export.runtime.bundle.manifest import (
    BACKENDS,
    KV_DTYPES,
    KV_LAYOUTS,
    PRECISIONS,
    Drift,
    Manifest,
    ModelInfo,
    Profile,
    TextInfo,
    TokenInfo,
    Variant,
    parse_manifest,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_arbitrary_json_is_refused_and_nothing_else(value: Any) -> None:
    with pytest.raises(BundleError):
        parse_manifest(json.dumps(value))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *[place for key, inner in below for place in places(inner, (*path, key))]]


WHOLE = json.loads(GOOD.to_json())


@given(st.sampled_from([p for p in places(WHOLE) if p]), JSON)
def test_a_manifest_with_anything_anywhere_is_read_or_refused(path: tuple[Any, ...], value: Any) -> None:
    whole = copy.deepcopy(WHOLE)
    target = whole
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    try:
        manifest = parse_manifest(json.dumps(whole))
    except BundleError:
        return
    assert parse_manifest(manifest.to_json()) == manifest


FREE_PRECISIONS = [precision for precision in PRECISIONS if precision != "w8a8"]  # which needs weight_bits
NAME = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True)
LINE = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    vocab = draw(st.integers(2, 2**24))
    token = st.integers(0, vocab - 1)
    mask = draw(token)
    kv_heads = draw(st.integers(1, 16))
    sizes = [draw(st.integers(1, 2**12)) for _ in range(4)]
    model = ModelInfo(
        draw(LINE),
        vocab,
        sizes[0],
        sizes[1],
        kv_heads * draw(st.integers(1, 8)),
        kv_heads,
        sizes[2],
        sizes[3],
    )
    files = [
        FileEntry(name, draw(st.integers(0, 2**40)), HASH)
        for name in draw(st.lists(NAME, min_size=1, max_size=5, unique=True))
    ]
    file = st.sampled_from([entry.path for entry in files])
    count = st.none() | st.integers(1, 10**6)
    drifts = st.none() | st.builds(
        Drift, st.integers(0, 99), st.integers(0, 99), st.floats(0, 1), st.floats(0, 1)
    )
    outputs = st.sampled_from(
        [("token_ids", "confidence"), ("token_ids", "confidence", "margin", "entropy", "logits")]
    )
    choices = [st.sampled_from(names) for names in (BACKENDS, FREE_PRECISIONS, KV_DTYPES, KV_LAYOUTS)]
    variants = [
        Variant(
            name,
            draw(choices[0]),
            draw(file),
            draw(st.none() | file),
            *(draw(c) for c in choices[1:]),
            draw(outputs),
            draw(count),
            draw(count),
            draw(count),
            draw(drifts),
        )
        for name in draw(st.lists(LINE, min_size=1, max_size=3, unique=True))
    ]
    evidence = st.dictionaries(
        st.text(max_size=5),
        st.integers() | st.text(max_size=5) | st.floats(allow_nan=False, allow_infinity=False),
        max_size=3,
    )
    variant = st.sampled_from([v.name for v in variants])
    profiles = draw(
        st.lists(
            st.builds(
                Profile,
                LINE,
                st.floats(0, 2),
                st.sampled_from(["probability", "margin", "entropy"]),
                variant,
                st.just(HASH),
                evidence,
            ),
            max_size=2,
        )
    )
    eos = tuple(i for i in draw(st.lists(token, max_size=3)) if i != mask)
    text = draw(st.none() | st.builds(TextInfo, file, st.none() | LINE, st.none() | LINE, st.none() | LINE))
    tokens = TokenInfo(mask, eos, draw(token))
    block, producer, source, revision = (
        draw(st.integers(1, 4096)),
        draw(LINE),
        draw(LINE),
        draw(st.none() | LINE),
    )
    return Manifest(
        producer, source, revision, model, block, tokens, text, tuple(variants), tuple(files), tuple(profiles)
    )


@settings(max_examples=20)
@given(manifests())
def test_every_manifest_is_read_as_it_was_written(manifest: Manifest) -> None:
    assert parse_manifest(manifest.to_json()) == manifest
