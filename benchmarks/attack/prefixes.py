"""Writers of prefixes, killed at random moments: the bundle always opens, and the next writer clears up.

    python benchmarks/attack/prefixes.py [--bundle BUNDLE] [--trials 1000] [--first SEED]

Each trial is a seed. Odd ones kill `mars-export prefix` itself, at any time of its life or just when it
writes; even ones a process that stores and removes prefixes as fast as it can. Behind each the bundle is
opened with all hashes, its prefixes are read, and one writer later nothing lies there that the manifest does
not list.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from mars_export.runtime.bundle import prefixes
from mars_export.runtime.bundle.manifest import CHECKSUM_FILE, MANIFEST_FILE, changing, open_bundle
from mars_export.runtime.bundle.prefixes import Made
from mars_export.runtime.bundle.profiles import sha256_of
from mars_export.runtime.bundle.stored import StoredPrefix
from mars_export.runtime.warm import read, written

HERE = Path(__file__).resolve()
BUNDLE = HERE.parents[2] / "tests" / "runtime" / "bundle" / "written-by-1.1"
SYSTEM = "the man and the inner error of the other one in the end\n" * 4
LONGEST = 20.0  # seconds that the command may take


def prefix(path: Path, seed: int) -> Made:
    """Any entries; only their size is the model's."""
    manifest, draw = open_bundle(path).manifest, np.random.default_rng(seed)
    model, variant = manifest.model, manifest.variants[0]
    ids = draw.integers(0, model.vocab_size, int(draw.integers(1, 60))).tolist()
    shape = (model.num_kv_heads, len(ids), model.head_dim)
    dtype = "f4" if variant.kv_dtype == "float32" else "f2"
    arrays = [draw.standard_normal(shape).astype(dtype) for _ in range(2 * model.num_layers)]
    file, content = written(ids, arrays, variant.kv_dtype)
    stored = StoredPrefix(
        f"p{seed % 3}", file, len(ids), None, variant.name, sha256_of(manifest, variant.file) or "",
        sha256_of(manifest, variant.weights), variant.precision, variant.kv_dtype, variant.kv_layout, "cpu",
        variant.accuracy_level,
    )  # fmt: skip
    return stored, content


def write_for_ever(path: Path, seed: int) -> None:
    """Store and remove until somebody ends it."""
    draw = random.Random(seed)
    made = [prefix(path, draw.randrange(1000)) for _ in range(8)]
    print("ready", flush=True)
    while True:
        known = {p.name for p in open_bundle(path).manifest.prefixes}
        if known and draw.random() < 0.4:
            prefixes.remove(path, draw.choice(sorted(known)))
        else:
            prefixes.store(path, [draw.choice(made)])


def check(path: Path, before: set[str]) -> list[str]:
    """What is wrong with a bundle whose writer was killed; `before`: what lay there at first. Afterwards a
    writer has been there.
    """
    wrong = []
    try:
        bundle = open_bundle(path, full=True)
        for stored in bundle.manifest.prefixes:
            ids, _ = read(path, stored, bundle.manifest.model)
            assert len(ids) == stored.length
        with changing(path):
            pass
        manifest = open_bundle(path, full=True).manifest
        left = {file.name for file in path.iterdir()} - listed(path) - before
        wrong += [f"left behind: {name}" for name in sorted(left)]
        used = {p.file for p in manifest.prefixes}
        wrong += [
            f"listed and not used: {n}" for n in listed(path) if n.startswith("prefix-") and n not in used
        ]
    except Exception as error:
        wrong.append(f"{type(error).__name__}: {error}")
    return wrong


def trial(path: Path, seed: int, system: Path, before: set[str]) -> str:
    """Start a writer and kill it; returns what it was at. `killed at work`: it has left something."""
    draw = random.Random(seed)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if seed % 2 == 0:
        command = [sys.executable, str(HERE), "--child", str(path), "--first", str(seed)]
    else:
        name = f"p{seed % 5}"
        command = [
            sys.executable,
            "-m",
            "mars_export",
            "prefix",
            str(path),
            "--system",
            str(system),
            "--name",
            name,
        ]
        command += ["--threads", "1", "--prefill-tokens", str(draw.choice([4, 7, 16]))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    try:
        assert process.stdout is not None
        if seed % 2 == 0:
            process.stdout.readline()
            time.sleep(draw.random() ** 2 * 0.2)
        elif draw.random() < 0.5:
            time.sleep(draw.random() * 3.0)
        else:
            state, end = stamp(path), time.monotonic() + LONGEST
            while process.poll() is None and stamp(path) == state and time.monotonic() < end:
                time.sleep(0.0005)
            time.sleep(draw.random() ** 2 * 0.03)
        ended = process.poll()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    if ended is not None:
        return "done" if ended == 0 else f"failed with {ended}"
    return "killed at work" if set(os.listdir(path)) - listed(path) - before else "killed"


def stamp(path: Path) -> int:
    return path.stat().st_mtime_ns


def listed(path: Path) -> set[str]:
    manifest = open_bundle(path).manifest
    return {entry.path for entry in manifest.files} | {MANIFEST_FILE, CHECKSUM_FILE}


def attack(bundle: Path, first: int, trials: int) -> tuple[Counter[str], list[str]]:
    """How far the writers were, and what was wrong."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="attack-") as place:
        path, system = Path(place) / "victim.bundle", Path(place) / "system.txt"
        shutil.copytree(bundle, path)
        system.write_text(SYSTEM)
        before = set(os.listdir(path))
        for seed in range(first, first + trials):
            counts[trial(path, seed, system, before)] += 1
            counts["with a prefix"] += bool(open_bundle(path).manifest.prefixes)
            found = check(path, before)
            wrong += [f"{seed}: {what}" for what in found]
            if found:
                shutil.rmtree(path)
                shutil.copytree(bundle, path)
    wrong += [f"{number} processes {how}" for how, number in counts.items() if how.startswith("failed")]
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help="a good one, small")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        write_for_ever(args.child, args.first)
    counts, wrong = attack(args.bundle, args.first, args.trials)
    print(json.dumps({"trials": args.trials, **counts, "wrong": len(wrong)}))
    print("\n".join(wrong), end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
