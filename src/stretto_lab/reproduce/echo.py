"""What the paper on data echoing says: another use of a batch is worth a load, and averages can be as rare as loads."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from stretto_lab.reproduce.measures import ACCURACY, LOSS, SENT, loads_to, loss_at
from stretto_lab.reproduce.record import MORE_SEEDS, Cell, Effect, Measure, Paper, Reading, Record, above
from stretto_lab.reproduce.verdict import Limits

ECHO = Paper(
    key="echo",
    title="Sharper Analysis of Data Echoing and New Communication-Efficient Algorithm for Data Parallelism",
    authors="anonymous, as submitted to ICLR 2025",
    links={"OpenReview 8ZA7lrzw7O": "https://openreview.net/forum?id=8ZA7lrzw7O"},
    read="four reviews and the answers; not the paper itself, so its figures only by what these say of them",
)
LOADS = 48
"""Fresh batches that a rank takes, on average where a coin decides."""
BATCH = 128
TARGET = 0.2
_FAR = 0.1
IMAGES = f"digits-resnet --ranks 2 --network free --micro-batches 1 --task.width 8 --task.batch {BATCH} --strategy ddp"
SCALE = f"a network of 19,810 parameters on digits; 2 virtual ranks, {LOADS} loads of {BATCH} images each, tuned rates"
DIFFERENCES = (
    "digits for CIFAR-10 and CIFAR-100; a learning rate tuned for every arm, in the paper one for all"
)
REAL = (
    "images --preset echo-mobilenet-cifar10 --task.data {data} --ranks 4 --network free --strategy ddp "
    "--evaluate-every 200"
)
RATES = {1: (0.1, 0.2, 0.4), 2: (0.05, 0.1, 0.2), 4: (0.025, 0.05, 0.1), 8: (0.025, 0.05, 0.1)}
_WIDE = (0.1, 0.2, 0.4)
_NEAR = loads_to(TARGET)
_USES = tuple(RATES)


def row(uses: int) -> str:
    """Return the name of the arm that uses a batch so many times on average."""
    return "p = 1" if uses == 1 else f"p = 1/{uses}"


class Arm(NamedTuple):
    """The options of an arm."""

    words: str
    """Here."""
    real: str
    """Where a preset says how many fresh samples a run has."""

    def cell(self, measure: Measure, rates: tuple[float, ...] = (), tuned_by: Measure | None = None) -> Cell:
        """Return what a measure says of it."""
        return Cell(words=self.words, real=self.real, measure=measure, rates=rates, tuned_by=tuned_by)

    def unseen(self) -> "Arm":
        """Return it without evaluations, for each of which replicas send an average."""
        return self._replace(words=re.sub(r"--evaluate-every \d+", "--evaluate-every None", self.words))


def _arm(updates: int, every: int | None, echo: str, strategy: str = "") -> Arm:
    length = f"--updates {updates}" + ("" if every is None else f" --evaluate-every {every}")
    echoed = "" if echo == "none" else f" --echo {echo}"
    return Arm(words=f"{length}{echoed}{strategy}", real=f"--echo {echo}{strategy}")


def coin(uses: int, strategy: str = "") -> Arm:
    """Return the arm that takes a fresh batch with a probability of 1/uses."""
    echo = "none" if uses == 1 else f"bernoulli:p={1 / uses:g}"
    return _arm(LOADS * uses, 2 * uses, echo, strategy)


def loads(of: Reading, uses: int, column: str) -> float:
    """Return by how many times fewer loads an arm needs than without echo."""
    return of(row(1), column) / of(row(uses), column)


CURVE = {
    row(uses): {
        "near": coin(uses).cell(_NEAR, RATES[uses], _NEAR),
        "far": coin(uses).cell(loads_to(_FAR), RATES[uses], _NEAR),
        "end": coin(uses).cell(LOSS, RATES[uses], _NEAR),
    }
    for uses in _USES
}
"""The curve over p."""


def _speedup(uses: int) -> Effect:
    return Effect(
        says=f"times fewer loads to {TARGET:g} with {row(uses)}",
        of=lambda of: loads(of, uses, "near"),
        limits=Limits(least=1, paper=float(uses)),
        digits=2,
    )


def _of_curve(
    id: str, claim: str, source: str, effects: tuple[Effect, ...], answer: str = "", told: str = ""
) -> Record:
    return Record(
        id=id,
        claim=claim,
        source=source,
        told=told,
        setting=IMAGES,
        real=REAL,
        cells=CURVE,
        effects=effects,
        scale=SCALE,
        differences=DIFFERENCES,
        answer=answer,
    )


_MEAN_P, _LOWEST = 0.55, 0.1
_SCHEDULE_RATES = (0.05, 0.1, 0.2)
_STEPS = round(LOADS / _MEAN_P)
_SCHEDULES = {
    "constant": f"{_MEAN_P}",
    "cosine, falling": f"cosine(1,{_LOWEST})",
    "linear, falling": f"linear(1,{_LOWEST})",
    "multi-step, falling": f"multistep(1,{_STEPS // 3},0.5,{2 * _STEPS // 3},0.15)",
    "cosine, rising": f"cosine({_LOWEST},1)",
}


def _schedules() -> dict[str, dict[str, Cell]]:
    found = {}
    for name, p in _SCHEDULES.items():
        words = f'--updates {_STEPS} --evaluate-every 4 --echo "bernoulli:p={p}"'
        found[name] = {
            "near": Cell(words=words, measure=_NEAR, rates=_SCHEDULE_RATES, tuned_by=_NEAR),
            "end": Cell(words=words, measure=LOSS, rates=_SCHEDULE_RATES, tuned_by=_NEAR),
        }
    return found


def _against(other: str) -> Effect:
    return Effect(
        says=f"times the loads of the falling cosine that {other} needs",
        of=lambda of: of(other, "near") / of("cosine, falling", "near"),
        limits=Limits(least=1),
        digits=2,
    )


_AVERAGED = {
    "DDP, echoed": coin(2),
    "averaged at p, echoed": coin(2, " --strategy local:rate=0.5:plan=bernoulli"),
    "DDP, not echoed": coin(1),
}
_AVERAGED_CELLS = {
    arm: {
        "accuracy": words.cell(ACCURACY, _WIDE),
        "end": words.cell(LOSS, _WIDE),
        "sent": words.unseen().cell(SENT),
    }
    for arm, words in _AVERAGED.items()
}
_TEXT = (
    "stdlib-gpt --ranks 2 --network free --micro-batches 1 --evaluate-every None --task.size 0.1m --task.context 64 "
    "--task.batch 8 --task.evaluation-windows 256 --task.data.megabytes 2 --strategy ddp"
)
_TEXT_LOADS = 120
_TEXT_ARMS = {
    "p = 1": _arm(_TEXT_LOADS, None, "none"),
    "p = 1/2": _arm(2 * _TEXT_LOADS, None, "bernoulli:p=0.5"),
    "p by a falling cosine": _arm(round(_TEXT_LOADS / 0.625), None, '"bernoulli:p=cosine(1,0.25)"'),
}


def _learned(
    id: str, claim: str, source: str, of: Callable[[Reading], float], says: str, limits: Limits
) -> Record:
    return Record(
        id=id,
        claim=claim,
        source=source,
        setting=IMAGES,
        real=REAL,
        cells=_AVERAGED_CELLS,
        effects=(Effect(says=says, of=of, limits=limits, digits=2),),
        seeds=MORE_SEEDS,
        scale=SCALE,
        differences=DIFFERENCES,
    )


ECHO_RECORDS = (
    _of_curve(
        "echo.saves",
        "Echoing saves loads",
        "review 1; answer to review 2",
        (
            Effect(
                says="times fewer loads with p = 1/2",
                of=lambda of: loads(of, 2, "near"),
                limits=Limits(least=1),
                digits=2,
            ),
        ),
    ),
    _of_curve(
        "echo.speedup",
        "The speed-up is linear in 1/p",
        "Theorem 3.8, by the answer to review 4",
        (
            Effect(
                says="power of 1/p that the speed-up follows, from p = 1 to 1/8",
                of=lambda of: math.log(loads(of, 8, "near")) / math.log(8),
                limits=Limits(least=0.9, most=1.1, paper=1.0),
                digits=2,
            ),
            *(_speedup(uses) for uses in _USES[1:]),
        ),
    ),
    _of_curve(
        "echo.burn-in",
        "The smaller p is, the later the speed-up comes",
        "Theorem 3.8, by the answer to review 4",
        (
            Effect(
                says=f"speed-up with p = 1/8 to {_FAR:g} over that to {TARGET:g}",
                of=lambda of: loads(of, 8, "far") / loads(of, 8, "near"),
                limits=Limits(least=1),
                digits=2,
            ),
        ),
    ),
    Record(
        id="echo.schedules",
        claim="A cosine that falls is the best schedule of p",
        source="answer to review 4, on Figure 3",
        setting=IMAGES,
        cells=_schedules(),
        effects=tuple(_against(other) for other in _SCHEDULES if other != "cosine, falling"),
        scale=f"{SCALE}; mean p 0.55 in all arms",
        differences=DIFFERENCES,
        answer="A cosine that rises is not in the paper.",
    ),
    Record(
        id="echo.steps",
        claim="Counted in steps, echoing is slower than SGD",
        kind="answer",
        source="answer to review 2",
        setting=IMAGES,
        cells={
            row(uses): {"loss": coin(uses).cell(loss_at("step", LOADS), RATES[uses], _NEAR)}
            for uses in (1, 2)
        },
        effects=(
            Effect(
                says=f"nats above p = 1 after {LOADS} updates, with p = 1/2",
                of=lambda of: of(row(2), "loss") - of(row(1), "loss"),
                limits=Limits(least=0),
                digits=3,
            ),
        ),
        scale=SCALE,
        differences=f"{DIFFERENCES}; the rate of p = 1 has ended there, that of p = 1/2 has come half-way",
    ),
    Record(
        id="echo.same-rate",
        claim="With one learning rate for both, small or large, echoing is the better one at equal loads",
        kind="answer",
        source="answer to review 2",
        setting=IMAGES,
        cells={
            row(uses): {
                f"rate {rate}": Cell(words=f"{coin(uses).words} --task.lr {rate}", measure=LOSS)
                for rate in (0.05, 0.4)
            }
            for uses in (1, 2)
        },
        effects=tuple(
            Effect(
                says=f"nats that p = 1/2 ends below p = 1, rate {rate}",
                of=above(row(1), row(2), f"rate {rate}"),
                limits=Limits(least=0),
                digits=3,
            )
            for rate in (0.05, 0.4)
        ),
        seeds=MORE_SEEDS,
        scale=SCALE.removesuffix(", tuned rates"),
        differences=DIFFERENCES.partition(";")[0],
    ),
    _learned(
        "echo.averaging",
        "Averaging replicas as often as batches are loaded costs no accuracy",
        "abstract of Algorithm 2, by review 1",
        lambda of: of("DDP, echoed", "accuracy") - of("averaged at p, echoed", "accuracy"),
        "points below DDP with the same echoes",
        Limits(most=1),
    ),
    _learned(
        "echo.communication",
        "Algorithm 2 takes the echoes without additional communication",
        "reviews 1 and 4",
        lambda of: of("averaged at p, echoed", "sent") / of("DDP, not echoed", "sent"),
        "times the bytes of DDP without echoes",
        Limits(most=1.1),
    ),
    Record(
        id="echo.figure7",
        claim="Echoing saves loads with a language model too",
        source="answer to review 1, on Figure 7",
        setting=_TEXT,
        real="language --preset echo-gpt2-wikitext2 --task.data {data} --ranks 4 --network free --strategy ddp",
        cells={arm: {"loss": words.cell(LOSS, (0.004, 0.008))} for arm, words in _TEXT_ARMS.items()},
        effects=tuple(
            Effect(
                says=f"nats that {arm} ends below p = 1 at equal loads",
                of=above("p = 1", arm, "loss"),
                limits=Limits(least=0),
                digits=3,
            )
            for arm in ("p = 1/2", "p by a falling cosine")
        ),
        seeds=3,
        scale=f"a byte model of 0.1 million parameters; 2 virtual ranks, {_TEXT_LOADS} loads of 8 windows each; "
        "tuned rates",
        differences="a model a thousand times smaller than GPT-2, and Python's sources for WikiText-2",
    ),
    Record(
        id="echo.figure1",
        claim="A speed of loading says which p to use",
        source="Figure 1, by review 2",
        told="in a figure",
        unchecked="its numbers are in no text that we could read; `stretto diagnose` measures how many uses are free "
        "on a machine",
    ),
    Record(
        id="echo.cifar",
        claim="Echoed ResNet and MobileNet on CIFAR-10 and CIFAR-100 end higher at equal loads",
        source="Figures 4 to 6, by the reviews",
        told="in figures",
        unchecked="needs the data and a GPU; `stretto train images --preset echo-mobilenet-cifar10` is a setting",
    ),
)
