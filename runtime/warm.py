"""A bundle's prefixes in the store of a session that was opened: mapped, read from disk when they are first
used. Knows no text and no prompts.
"""

from __future__ import annotations

import warnings

from .bundle.manifest import Bundle, Variant
from .bundle.prefix_file import read
from .bundle.prefixes import is_for, renewal, staleness
from .decode.prefix import Prefixes, Stored
from .errors import BundleError, MarsWarning


def adopt(bundle: Bundle, variant: Variant, device: str, store: Prefixes) -> None:
    """Put what was made for `variant` on `device` into the store; what is stale is left out, with one
    warning that names the commands.
    """
    manifest, stale = bundle.manifest, []
    for prefix in manifest.prefixes:
        if not is_for(prefix, variant, device):
            continue
        if reasons := staleness(manifest, variant, prefix):
            command = renewal(bundle.path, prefix, len(manifest.variants))
            stale.append(f"prefix `{prefix.name}` ({'; '.join(reasons)}):\n  {command}")
        # Where entries depend on the step they belong to pieces of one size, elsewhere to none.
        elif (prefix.piece is None) == (store.firm_slots is not None):
            try:
                ids, arrays = read(bundle.path, prefix, manifest.model)
            except BundleError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    continue  # it was taken out of the bundle since that was opened
                raise
            store.adopt(prefix.piece or 1, ids, Stored(arrays, prefix.length))
    if stale:
        text = "\n".join(stale)
        warnings.warn(f"{bundle.path}: stale and not used, make it again: {text}", MarsWarning, stacklevel=3)
