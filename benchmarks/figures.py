"""The figures of the pages, drawn from the raw data in `benchmarks/results/` and from the virtual cluster.

    python benchmarks/figures.py

Equal data give equal files, byte for byte, with one version of matplotlib; `tests/docs/test_figures.py` draws them
again. Colours are those of Okabe and Ito, which the colour-blind can tell apart, and no colour stands alone.
"""

import io
import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from stretto import ACCO, DDP, DataParallel, Options, Strategy
from stretto_lab.peers import PEERS
from stretto_lab.virtual import Compute, Span, Trace, Transfer, VirtualCluster, parse_network

RESULTS = Path(__file__).resolve().parent / "results"
FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8A8A8A"
STYLE = {
    "svg.fonttype": "none",  # text that can be searched, and small files
    "svg.hashsalt": "stretto",  # equal names inside equal files
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
}
FRONTIER, RACE = "2026-11-23-frontier", "2026-11-23-race"
WIDTH = 6.2
"""Inches."""


# Lanes


def trace_of(strategy: Strategy) -> Trace:
    """Return what two virtual ranks do in ten updates, whose exchange takes nearly two micro-batches."""

    options = Options(bucket_bytes=230_000)  # a bucket for each layer, which leaves during the backward pass

    def program(rank: int, group: Any) -> None:
        model = torch.nn.Sequential(*[torch.nn.Linear(236, 236) for _ in range(4)])
        optimizer = torch.optim.AdamW(model.parameters())
        with DataParallel(
            model, optimizer, strategy, micro_batches=4, group=group, options=options
        ) as parallel:
            for _ in range(40):
                parallel.backward(model(torch.full((1, 236), 1.0 + rank)).square().mean())
            parallel.finish()

    compute = Compute(micro_batch_ns=4_000_000, step_ns=400_000)
    return VirtualCluster(2, network=parse_network("1gbit"), compute=compute).run(program).trace


def draw_lanes() -> Figure:
    """Draw both lanes of a rank, synchronous and under ACCO, over the same virtual time."""
    shown_ms = 71
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    axes = figure.subplots(2, sharex=True)
    strategies = {"Synchronous": DDP(), "Hidden (ACCO)": ACCO()}
    for ax, (title, strategy) in zip(axes, strategies.items(), strict=True):
        records = trace_of(strategy).records
        work = [record for record in records if isinstance(record, Span) and record.rank == 0]
        batches = [span for span in work if span.work == "micro-batch"]
        start_ns = batches[8].start_ns  # the first updates fill the lanes
        stop_ns = start_ns + shown_ms * 1_000_000
        bars = {
            BLUE: (1, batches),
            GREEN: (0, [span for span in work if span.work in ("step", "preview")]),
            ORANGE: (0, [record for record in records if isinstance(record, Transfer)]),
        }
        ax.broken_barh(
            [(0, shown_ms)], (0.62, 0.76), facecolor="white", edgecolor=GREY, hatch="////", linewidth=0
        )
        for colour, (lane, done) in bars.items():
            pieces = [
                ((one.start_ns - start_ns) / 1e6, (one.stop_ns - one.start_ns) / 1e6)
                for one in done
                if one.stop_ns > start_ns and one.start_ns < stop_ns
            ]
            ax.broken_barh(pieces, (lane - 0.38, 0.76), facecolor=colour, edgecolor="white", linewidth=0.8)
        steps = [span.start_ns for span in work if span.work == "step"]
        every_ms = (steps[4] - steps[3]) / 1e6
        ax.set_title(f"{title}: an update every {every_ms:.1f} ms", loc="left", fontsize=9, fontweight="bold")
        ax.set(xlim=(0, shown_ms), ylim=(-0.5, 1.5), yticks=[0, 1], yticklabels=["communicate", "compute"])
        ax.tick_params(left=False, bottom=False)
        ax.spines[:].set_visible(False)
    axes[0].tick_params(labelbottom=False)
    axes[1].set_xlabel("virtual milliseconds")
    handles = [
        mpl.patches.Patch(facecolor=BLUE, label="micro-batch"),
        mpl.patches.Patch(facecolor="white", edgecolor=GREY, hatch="////", label="waits"),
        mpl.patches.Patch(facecolor=ORANGE, label="exchange"),
        mpl.patches.Patch(facecolor=GREEN, label="optimizer"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


# Time to loss


LINK_TITLES = {
    "none": "free wire",
    "1gbit": "1 Gbit/s",
    "100mbit": "100 Mbit/s",
    "37mbit": "37 Mbit/s",
    "10mbit": "10 Mbit/s",
    "10mbit/100mbit": "10 Mbit/s there, 100 Mbit/s back",
    "1mbit": "1 Mbit/s",
}


OTHER_LIBRARIES = ("accelerate-local-sgd", "torchft-diloco", "hivemind")
"""As results name the arms of `peers/other_libraries.py`."""


def draw_time_to_loss() -> Figure:
    """Draw every arm's time to the held-out loss on every link, as multiples of a free wire's: medians and ranges."""
    rows = json.loads((RESULTS / RACE / "time-to-loss.json").read_text(encoding="utf-8"))
    by_link = {link: [row for row in rows if row["link"] == link] for link in LINK_TITLES}
    most = max(multiple for row in rows for multiple in row["multiples"])
    figure = Figure(figsize=(WIDTH, 9.6), layout="constrained")
    axes = figure.subplots(
        len(by_link), sharex=True, height_ratios=[len(of_link) + 1 for of_link in by_link.values()]
    )
    for ax, (link, of_link) in zip(axes, by_link.items(), strict=True):
        arms = sorted(of_link, key=lambda row: statistics.median(row["multiples"] or [math.inf]))
        for place, row in enumerate(arms):
            stock = row["arm"].partition(":")[0] in (*PEERS, *OTHER_LIBRARIES)
            colour, marker = (ORANGE, "s") if stock else (BLUE, "o")
            if row["multiples"]:
                low, median, high = (function(row["multiples"]) for function in (min, statistics.median, max))
                ax.plot([low, high], [place, place], color=colour, linewidth=1.5)
                ax.plot(median, place, marker, color=colour, markersize=6)
                ax.annotate(f"{median:.2f}", (high, place), (6, -3), textcoords="offset points", fontsize=8)
            else:
                ax.annotate("not reached", (1, place), (4, -3), textcoords="offset points", fontsize=8)
            ax.axhline(place, color="#E4E4E4", linewidth=0.8, zorder=0)
        names = [
            re.sub(":outer_lr=1:outer_momentum=0:(keep_progress=on|mix=0.5)", "", row["arm"]) for row in arms
        ]
        ax.set_yticks(range(len(arms)), names)
        ax.set(xscale="log", xlim=(0.8, 1.5 * most), ylim=(len(arms) - 0.4, -0.6))
        ax.set_xticks([1, 1.5, 2, 3, 4, 6, 8], ["1", "1.5", "2", "3", "4", "6", "8"], minor=False)
        ax.set_xticks([], minor=True)
        ax.set_title(LINK_TITLES[link], loc="left", fontsize=9, fontweight="bold")
        ax.tick_params(left=False)
        ax.spines["left"].set_visible(False)
    axes[-1].set_xlabel("time to a loss; 1: synchronous, on a free wire")
    handles = [
        mpl.lines.Line2D([], [], marker="o", color=BLUE, linestyle="", label="Stretto"),
        mpl.lines.Line2D([], [], marker="s", color=ORANGE, linestyle="", label="PyTorch and other libraries"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


# Loss against bytes


_AVERAGE = "diloco:outer_lr=1:outer_momentum=0:keep_progress=on:wire=int4:interval="
FAMILIES: dict[str, tuple[str, str, dict[str, str]]] = {
    "fewer bits, every update": (
        BLUE,
        "o",
        {"zero1:wire=int8": "int8", "zero1:wire=int4": "int4", "zero1:wire=int2": "int2"},
    ),
    "2 bits that are right on average": (BLUE, "D", {"zero1:wire=rotated2": "rotated2"}),
    "replicas averaged now and then, in 4 bits": (
        GREEN,
        "^",
        {
            f"{_AVERAGE}2:delay=1": "average:2",
            f"{_AVERAGE}4:fragments=2:delay=1": "average:4",
            f"{_AVERAGE}10:fragments=5:delay=1": "average:10",
            f"{_AVERAGE}30:fragments=10:delay=2": "average:30",
        },
    ),
    "PyTorch's PowerSGD": (ORANGE, "s", {"torch-ddp-powersgd": "powersgd"}),
}
"""Legend, colour, marker, and the names of the arms of `experiments/frontier.py`, those that send most first."""
LABELLED_ABOVE = ("average:2", "int2")
"""Where others are in the way below."""
RANKS = {"2-ranks": ("2 ranks", "-"), "8-ranks": ("8 ranks", "--"), "32-ranks": ("32 ranks", ":")}
"""Of the settings: name and line."""


def draw_frontier() -> Figure:
    """Draw what sending less costs: nats above synchronous training, against bytes as a share of its own."""
    found = json.loads((RESULTS / FRONTIER / "frontier.json").read_text(encoding="utf-8"))["settings"]
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    ax = figure.subplots()
    for family, (colour, marker, names) in FAMILIES.items():
        for setting, (ranks, line) in RANKS.items():
            arms = [arm for arm in names if arm in found[setting]]
            whole = found[setting]["ddp"]["sent_bytes"]
            shares = [100 * found[setting][arm]["sent_bytes"] / whole for arm in arms]
            nats = [found[setting][arm]["against_ddp"]["mean"] for arm in arms]
            ax.plot(shares, nats, marker=marker, markersize=4, color=colour, linestyle=line)
            if family.startswith("replicas"):
                ax.annotate(
                    ranks,
                    (shares[-1], nats[-1]),
                    (0, 6),
                    textcoords="offset points",
                    color=colour,
                    ha="center",
                )
            if setting == "2-ranks":
                for arm, share, loss in zip(arms, shares, nats, strict=True):
                    ax.annotate(
                        names[arm],
                        (share, loss),
                        (0, 5 if names[arm] in LABELLED_ABOVE else -11),
                        textcoords="offset points",
                        ha="center",
                        fontsize=7.5,
                    )
        ax.plot([], [], marker=marker, color=colour, linestyle="", label=family)
    for ranks, line in RANKS.values():
        ax.plot([], [], color=GREY, linestyle=line, label=ranks)
    ax.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    ax.set(xscale="log", xlim=(0.35, 50), ylim=(-0.06, 0.8))
    ax.set_xticks([0.5, 1, 2, 5, 10, 20, 40], ["0.5", "1", "2", "5", "10", "20", "40"])
    ax.minorticks_off()
    ax.set_xlabel("bytes per update, % of those of fp32")
    ax.set_ylabel("held-out loss above fp32, nats per byte")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


# Echo


def draw_echo() -> Figure:
    """Draw the steps per second of each plan behind slow loaders, as shares of those on a cached batch."""
    cells = json.loads((RESULTS / "2026-11-21-echo-speed" / "echo.json").read_text(encoding="utf-8"))["one"]
    plans = {
        "ready": (BLUE, "o", "-"),
        "even": (GREEN, "^", "-"),
        "read ahead": (ORANGE, "s", "--"),
        "bare": (GREY, "x", ":"),
    }
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, (jitter, title) in zip(
        axes, {0.0: "steady loader", 1.0: "irregular loader"}.items(), strict=True
    ):
        of_loader = [cell for cell in cells if cell["jitter"] == jitter]
        ratios = [cell["ratio"] for cell in of_loader]
        for plan, (colour, marker, line) in plans.items():
            shares = [cell["shares"][plan] for cell in of_loader]
            low, high = ([100 * share[bound] for share in shares] for bound in ("low", "high"))
            middle = [100 * share["median"] for share in shares]
            ax.fill_between(ratios, low, high, color=colour, alpha=0.15, linewidth=0)
            ax.plot(ratios, middle, color=colour, marker=marker, linestyle=line, label=plan, markersize=5)
        ax.set_title(title, loc="left", fontsize=9, fontweight="bold")
        ax.set(ylim=(0, 110), xticks=[0.5, 1.5, 2.5, 5], xlabel="seconds of a read / of a step")
    axes[0].set_ylabel("% of full speed")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


FIGURE: dict[str, Callable[[], Figure]] = {
    "lanes": draw_lanes,
    "time-to-loss": draw_time_to_loss,
    "frontier": draw_frontier,
    "echo-speed": draw_echo,
}
"""From the name of a file in `docs/figures/` to what draws it."""


def draw(folder: Path) -> None:
    """Draw all figures into a folder."""
    with mpl.rc_context(STYLE):
        for name, make in FIGURE.items():
            drawn = io.StringIO()
            make().savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
            text = drawn.getvalue()
            # Names of clip paths are digests of places, whose last bits the solver of the layout leaves open.
            for number, digest in enumerate(dict.fromkeys(re.findall(r"p[0-9a-f]{10}(?=[)\"])", text))):
                text = text.replace(digest, f"clip{number}")
            (folder / f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    draw(FIGURES)
