"""PAFT's tables and figures as cells: the paper's numbers, and the runs that stand beside them."""

from collections.abc import Sequence

from stretto_lab.reproduce.measures import ACCURACY, LOSS, MILLISECONDS
from stretto_lab.reproduce.record import Cell, Effect, Measure
from stretto_lab.reproduce.verdict import Limits

SMALL = (
    "digits-resnet --ranks 4 --network free --micro-batches 1 --updates 100 --task.width 8 --task.batch 16 "
    "--evaluate-every None"
)
"""Also that of what reviewers asked."""
REAL = (
    "images --preset paft-resnet18-cifar10 --task.data {data} --ranks 4 --network free --evaluate-every None "
    "--noise None"
)
SCALE = "a network of 19,810 parameters on digits; 4 virtual ranks, 100 updates of 64 images"
DIFFERENCES = "digits and a small network for CIFAR-10 and ResNet-18; 100 updates for 120 epochs"
VARIANCES = ("1e-4", "1e-3", "1e-2", "1e-1")
_STRATEGIES = {
    "Noised DSGD": "ddp",
    "PAFT-Sync H = 5": "paft-sync:interval=5",
    "PAFT-Sync H = 10": "paft-sync:interval=10",
    "PAFT-Sync H = 50": "paft-sync:interval=50",
    "PAFT": "paft-dyn:estimate=paper:overlap=on",
    "PAFT, our estimate": "paft-dyn",
    "ZeRO-1": "zero1",
}
_TABLE_1 = {
    "DSGD": (94.0, 94.0, 94.0, 94.0),
    "Noised DSGD": (93.7, 91.1, 60.5, 13.5),
    "PAFT-Sync H = 5": (93.8, 93.3, 85.2, 32.8),
    "PAFT-Sync H = 10": (93.9, 93.6, 84.7, 31.9),
    "PAFT-Sync H = 50": (93.9, 93.4, 84.3, 28.5),
    "PAFT": (93.9, 93.4, 85.2, 33.2),
}
_TABLE_2 = {
    "DSGD": 65.1,
    "Noised DSGD": 3.8,
    "PAFT-Sync H = 5": 44.4,
    "PAFT-Sync H = 10": 41.8,
    "PAFT-Sync H = 50": 17.2,
    "PAFT": 40.9,
}
_TABLE_3 = {
    "DSGD": (0.201, 0.212, 0.228, 0.333),
    "PAFT-Sync": (0.243, 0.254, 0.276, 0.411),
    "PAFT": (0.237, 0.244, 0.253, 0.373),
}
_WORKERS = (4, 8, 16, 32)
_STEPS, _PARAMETERS = 20, 19_810
SAME = 1.0
"""Points of accuracy that count as no difference: the paper's own arms without noise are as far apart."""


def noised(row: str, variance: str) -> str:
    """Return the words of an arm of Table 1."""
    if row == "DSGD":
        return "--strategy ddp"
    return f"--strategy {_STRATEGIES[row]} --noise {variance}"


def table_1(*rows: str, variances: Sequence[str] = VARIANCES) -> dict[str, dict[str, Cell]]:
    """Return a part of Table 1; by default all rows of the paper and two of ours."""
    return {
        row: {
            variance: Cell(
                words=noised(row, variance),
                measure=ACCURACY,
                paper=_TABLE_1[row][place] if row in _TABLE_1 else None,
            )
            for place, variance in enumerate(VARIANCES)
            if variance in variances
        }
        for row in rows or ("DSGD", *_STRATEGIES)
    }


def lost(variance: str, row: str, limits: Limits, to: str = "DSGD") -> Effect:
    """Return the points of accuracy that an arm ends below another one."""
    return Effect(
        says=f"points of {row} below {to}, σ² = {variance}",
        of=lambda of: of(to, variance) - of(row, variance),
        limits=limits,
    )


MANY = (
    "digits-resnet --ranks 32 --network free --micro-batches 1 --updates 60 --task.width 8 --task.batch 4 "
    "--evaluate-every None"
)


def table_2() -> dict[str, dict[str, Cell]]:
    rows = ("DSGD", *_STRATEGIES)
    return {
        row: {"1e-2": Cell(words=noised(row, "1e-2"), measure=ACCURACY, paper=_TABLE_2.get(row))}
        for row in rows
    }


_TIMED = {
    "DSGD": "--strategy ddp",
    "PAFT-Sync": "--strategy paft-sync:interval=5",
    "PAFT": "--strategy paft-dyn:first=5:estimate=paper:overlap=on:probe=64",
    "PAFT, our estimate": "--strategy paft-dyn:first=5:overlap=on:probe=64",
}


def table_3() -> dict[str, dict[str, Cell]]:
    return {
        row: {
            f"{ranks} workers": Cell(
                words=f"{words} --ranks {ranks}",
                measure=MILLISECONDS,
                paper=1000 * _TABLE_3[row][place] if row in _TABLE_3 else None,
            )
            for place, ranks in enumerate(_WORKERS)
        }
        for row, words in _TIMED.items()
    }


def overhead(ranks: int) -> tuple[Effect, Effect]:
    column = f"{ranks} workers"
    return (
        Effect(
            says=f"% that PAFT-Sync adds on {column}",
            of=lambda of: 100 * (of("PAFT-Sync", column) / of("DSGD", column) - 1),
            limits=Limits(least=0),
        ),
        Effect(
            says=f"of these PAFT saves on {column}, points",
            of=lambda of: 100 * (of("PAFT-Sync", column) - of("PAFT", column)) / of("DSGD", column),
            limits=Limits(least=0),
        ),
    )


def bursts(variance: str) -> dict[str, dict[str, Cell]]:
    rows = {
        "DSGD": "--strategy ddp",
        **{
            row: f"--strategy {_STRATEGIES[row]} --noise 1e-4,every=30:{variance}"
            for row in ("Noised DSGD", "PAFT-Sync H = 10", "PAFT")
        },
    }
    return {row: {variance: Cell(words=words, measure=ACCURACY)} for row, words in rows.items()}


APART = (
    "digits-resnet --network free --micro-batches 1 --task.width 8 --task.batch 16 --evaluate-every None "
    "--task.sgd.momentum 0 --task.sgd.weight-decay 0 --task.lr 0.05 --task.schedule.warmup 0 --task.schedule.floor 1 "
    f"--updates {_STEPS} --strategy paft-dyn:first={_STEPS}:minimum={_STEPS}:probe=1000000"
)


def apart() -> dict[str, dict[str, Cell]]:
    """Return how far replicas part until the first average, in units of σ² Σ η² per coordinate."""
    unit = _PARAMETERS * _STEPS * 0.05**2

    def measure(variance: str) -> Measure:
        return Measure(
            unit="σ² Σ η²",
            of=lambda line: (
                line["divergences"][0] ** 2 / (unit * float(variance)) if line["divergences"] else None
            ),
            digits=3,
        )

    return {
        f"{workers} workers": {
            variance: Cell(
                words=f"--ranks {workers} --noise {variance}",
                measure=measure(variance),
                paper=(workers + 1) / workers,
            )
            for variance in ("1e-4", "1e-3")
        }
        for workers in (2, 4, 8)
    }


TEXT = (
    "stdlib-gpt --ranks 4 --network free --updates 100 --micro-batches 1 --evaluate-every None --task.size 0.1m "
    "--task.context 64 --task.batch 4 --task.lr 0.004 --task.evaluation-windows 256 --task.data.megabytes 2"
)
_TEXT_ROWS = {"DSGD": "ddp", "Noised DSGD": "ddp", "PAFT-Sync H = 5": "paft-sync:interval=5"}
TEXT_CELLS = {
    row: {
        variance: Cell(
            words=f"--strategy {strategy}" + ("" if row == "DSGD" else f" --noise {variance}"), measure=LOSS
        )
        for variance in ("1e-4", "1e-3")
    }
    for row, strategy in _TEXT_ROWS.items()
}
