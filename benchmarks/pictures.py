"""The pictures of the docs, from a server that runs: the page in a browser, and the dashboard's queries.

    python benchmarks/pictures.py page BUNDLE                              # docs/images/serve.png
    python benchmarks/pictures.py dashboard BUNDLE --prometheus PROGRAM    # docs/images/dashboard.png

`page` needs Chromium and the extra `browser`. `dashboard` needs a Prometheus (Debian has one): it scrapes the
server while clients come and go, and what it answers to the queries of deploy/grafana/mars-export.json is
drawn here by matplotlib, in the dashboard's places and not in Grafana's style.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving import loops, prompts
from serving.loops import asker
from serving.server import Server, ours

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
DASHBOARD = ROOT / "deploy" / "grafana" / "mars-export.json"
TOOLS = "Reply with tool calls."
REQUEST = "turn on the kitchen light and set a timer for 12 minutes"
WINDOW = "20s"  # of a rate, where Grafana chooses


# --- the page ---


def page(args: argparse.Namespace) -> None:
    from playwright.sync_api import sync_playwright

    warm = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 24}
    with Server(ours(args.bundle, args.threads, 8, 64), args.logs / "pictures.log") as server:
        for fields in ({"exact": True}, {"tau": 1}) * 2:
            asyncio.run(loops.closed(asker(server.port, fields), [warm], 1))
        with sync_playwright() as driver:
            options = {"executable_path": shutil.which("chromium"), "args": ["--no-sandbox"]}
            browser = driver.chromium.launch(**options)
            for scheme in args.schemes:
                size = {"width": 1180, "height": 760}
                tab = browser.new_context(color_scheme=scheme, viewport=size).new_page()
                tab.goto(f"http://127.0.0.1:{server.port}/")
                tab.get_by_role("status", name="Server").get_by_text("ready").wait_for()
                tab.get_by_role("button", name="Compare with one token").click()
                tab.get_by_role("button", name=REQUEST).click()
                tab.get_by_role("group", name="Comparison").wait_for(timeout=60_000)
                tab.locator("article .t.verified", has_text="light").hover()
                tab.wait_for_timeout(600)  # bars grow
                path = args.out / ("serve.png" if scheme == "light" else f"serve-{scheme}.png")
                path.parent.mkdir(parents=True, exist_ok=True)
                tab.screenshot(path=path)
                shrink(path)
                print(f"{path.name}: {path.stat().st_size} bytes")
            browser.close()


def shrink(path: Path) -> None:
    """As few colours as the eye needs."""
    from PIL import Image

    with Image.open(path) as image:
        few = image.convert("RGB").quantize(192, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


# --- the dashboard ---


@contextmanager
def prometheus(program: str, target: int, port: int, scratch: Path) -> Iterator[str]:
    """Scrapes this machine's port `target`; the address of its API."""
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": "mars", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
    }
    (scratch / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # YAML holds JSON
    words = [program, f"--config.file={scratch}/prometheus.yml", f"--storage.tsdb.path={scratch}/data"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}/api/v1"
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{address}/status/buildinfo").close()
                break
            except OSError:
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


def asked(address: str, query: str, begin: float, end: float) -> list[dict[str, Any]]:
    """The series of a query. Raises for one that Prometheus does not understand."""
    query = query.replace("$__rate_interval", WINDOW).replace("$model", ".*")
    fields = {"query": query, "start": begin, "end": end, "step": 1}
    with urllib.request.urlopen(f"{address}/query_range?{urllib.parse.urlencode(fields)}") as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def load(port: int, seconds: float) -> None:
    """Few clients, many, and few again; now exact, now at a tau."""
    until = time.monotonic() + seconds
    ways: list[tuple[int, dict[str, Any]]] = [(2, {"exact": True}), (12, {"exact": True})]
    ways += [(12, {"tau": 0.9}), (4, {"tau": 1})]
    for i, (clients, fields) in enumerate(ways):
        last = until - seconds * (1 - (i + 1) / len(ways))
        seed = 0
        while time.monotonic() < last:
            some = prompts.chats(list(prompts.TASKS), clients * 2, 48, seed)
            asyncio.run(loops.closed(asker(port, fields), some, clients))
            seed += 1


def dashboard(args: argparse.Namespace) -> None:
    if args.prometheus is None:
        raise SystemExit(
            "error: no prometheus found; give --prometheus PROGRAM (Debian: apt-get install prometheus)"
        )
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    with (
        tempfile.TemporaryDirectory() as scratch,
        Server(ours(args.bundle, args.threads, 8, 64), args.logs / "pictures.log") as server,
        prometheus(args.prometheus, server.port, args.port, Path(scratch)) as address,
    ):
        begin = time.time()
        load(server.port, args.seconds)
        end = time.time()
        series = {p["id"]: [asked(address, t["expr"], begin, end) for t in p["targets"]] for p in panels}
    draw(panels, series, begin, args.out / "dashboard.png")
    empty = [p["title"] for p in panels if not any(series[p["id"]])]
    print(f"written; panels without a value: {empty or 'none'}")


def named(words: str, metric: dict[str, str]) -> str:
    for name, value in metric.items():
        words = words.replace("{{" + name + "}}", value)
    return words


def draw(panels: list[dict[str, Any]], series: dict[int, Any], begin: float, path: Path) -> None:
    """Each panel in its place; a stat shows its last value."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    rows = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    figure = plt.figure(figsize=(13, rows * 0.31), facecolor="#f7f4f1")
    for panel in panels:
        at, unit = panel["gridPos"], panel["fieldConfig"]["defaults"]["unit"]
        high = panel["type"] == "timeseries"
        place = (at["x"] / 24 + 0.03, 1 - (at["y"] + at["h"]) / rows + (0.045 if high else 0.01))
        size = (at["w"] / 24 - 0.045, at["h"] / rows - (0.082 if high else 0.045))
        axes = figure.add_axes((*place, *size), facecolor="white")
        axes.set_title(panel["title"], fontsize=9, loc="left", color="#333333")
        lines = [
            (named(target["legendFormat"], found["metric"]), found["values"])
            for target, results in zip(panel["targets"], series[panel["id"]], strict=True)
            for found in results
        ]
        if not high:
            last = [float(values[-1][1]) for _, values in lines]
            words = (
                "–"
                if not last or last[0] != last[0]
                else f"{last[0]:.0%}"
                if unit == "percentunit"
                else f"{last[0]:.3g}"
            )
            axes.text(0.5, 0.45, words, ha="center", va="center", fontsize=22, color="#b5441d", weight="bold")
            axes.set_axis_off()
            continue
        for name, values in lines:
            axes.plot(
                [float(t) - begin for t, _ in values], [float(v) for _, v in values], lw=1.5, label=name
            )
        if unit == "percentunit":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=7, colors="#666666")
        axes.set_xlabel(
            "s" if unit != "s" else "s (values in s, too)", fontsize=7, color="#666666", labelpad=1
        )
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if lines:
            axes.legend(fontsize=6.5, frameon=False, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)
    shrink(path)


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True)
    for name, run in (("page", page), ("dashboard", dashboard)):
        made = commands.add_parser(name)
        made.set_defaults(run=run)
        made.add_argument("bundle", type=Path)
        made.add_argument("--threads", type=int, default=2)
        made.add_argument("--logs", type=Path, default=Path("build/logs"))
        made.add_argument("--out", type=Path, default=IMAGES)
    commands.choices["page"].add_argument(
        "--schemes", nargs="+", choices=("light", "dark"), default=["light"]
    )
    made = commands.choices["dashboard"]
    made.add_argument("--prometheus", default=shutil.which("prometheus"))
    made.add_argument("--port", type=int, default=9490, help="Prometheus' own")
    made.add_argument("--seconds", type=float, default=180)
    args = top.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
