"""A manifest with anything anywhere is read as it was written or refused, and nothing worse."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.manifests import GOOD

from mars_export import BundleError
from mars_export.runtime.bundle.manifest import parse_manifest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


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
