"""What ACCO's paper says: equal loss, less time, little memory, and workers of different speeds."""

from collections.abc import Callable

from stretto.strategies import STRATEGIES
from stretto.strategies.ledger import ledger_of
from stretto_lab.reproduce.measures import ACCURACY, LOSS, RATE, WAITED, loss_at, seconds_to
from stretto_lab.reproduce.record import MORE_SEEDS, Cell, Effect, Measure, Paper, Reading, Record
from stretto_lab.reproduce.verdict import Limits

ACCO = Paper(
    key="acco",
    title="ACCO: Accumulate While You Communicate for Communication-Overlapped Sharded LLM Training",
    authors="Nabli, Fournier, Erbacher, Serrano, Belilovsky, Oyallon",
    links={
        "arXiv 2406.02613": "https://arxiv.org/abs/2406.02613",
        "OpenReview UV1jr2aJ2J": "https://openreview.net/forum?id=UV1jr2aJ2J",
        "OpenReview 1qKUVyymXs": "https://openreview.net/forum?id=1qKUVyymXs",
    },
    read="the abstract, five reviews and the answers to them at ICLR 2025; not its tables and figures, whose "
    "numbers we know where these pages name them",
)
REAL = "language --preset acco-openwebtext --task.data {data} --ranks 8 --network free --evaluate-every None"
_EQUAL = 0.02
"""Nats that count as no difference of held-out loss: one percent of where these models end."""


def _language(ranks: int, updates: int, batch: int, megabytes: int, windows: int) -> str:
    return (
        f"stdlib-gpt --ranks {ranks} --network free --updates {updates} --micro-batches 2 --clip-norm 1 "
        f"--evaluate-every None --task.size 0.1m --task.context 64 --task.batch {batch} --task.lr 0.008 "
        f"--task.schedule.warmup {updates // 10} --task.evaluation-windows {windows} "
        f"--task.data.megabytes {megabytes}"
    )


_LONG = _language(2, 1500, 4, 4, 256)
_TWO = _language(2, 300, 4, 2, 256)
_EIGHT = _language(8, 100, 1, 1, 256)
_MANY = _language(32, 40, 1, 1, 64)
_SIZES = {"2 workers": _TWO, "8 workers": _EIGHT, "32 workers": _MANY}
_ARMS = {"synchronous": "zero1", "ACCO": "acco", "ACCO-WP": "wp", "DPU": "dpu"}
_AS_TEXT = (
    "a byte model of 0.1 million parameters on Python's sources, batches of 16 to 64 windows of 64 bytes"
)
_LEARNED = "a model a thousand times smaller; a rate tuned for synchronous training; virtual workers"


def _losses(*arms: str) -> dict[str, dict[str, Cell]]:
    return {arm: {"held-out loss": Cell(words=f"--strategy {_ARMS[arm]}", measure=LOSS)} for arm in arms}


def _above(arm: str, limits: Limits) -> Effect:
    return Effect(
        says=f"{arm} above synchronous, nats",
        of=lambda of: of(arm, "held-out loss") - of("synchronous", "held-out loss"),
        limits=limits,
        digits=3,
    )


def _quality(ranks: int, updates: int, longer: str) -> Record:
    return Record(
        id=f"acco.workers-{ranks}",
        claim=f"ACCO matches synchronous training on {ranks} workers",
        source="Table 2, by review 2 and the answer to it",
        setting=_SIZES[f"{ranks} workers"],
        cells=_losses("synchronous", "ACCO"),
        effects=(_above("ACCO", Limits(least=-_EQUAL, most=_EQUAL)),),
        seeds=3,
        scale=f"{_AS_TEXT}; {ranks} virtual ranks, {updates} updates",
        differences=_LEARNED,
        answer="Review 2 saw the quality fall from 8 to 32 workers, and the authors put it down to other hardware and "
        f"fewer tokens. These short runs do not decide it. One seed of 1,500 updates ended {longer} nats above "
        "([frontier](../benchmarks/results/2026-11-23-frontier/)).",
    )


_SLOW = (
    "digits-resnet --ranks 4 --network 10mbit --micro-batch-ms 10 --jitter 0.05 --task.width 8 --task.batch 8 "
    "--evaluate-every 4"
)
_RATES = (0.1, 0.2)
_TIME_ARMS = {
    "DDP, an exchange for every micro-batch": "--strategy ddp --micro-batches 1 --updates 200 --evaluate-every 10",
    "ZeRO-1, 8 micro-batches": "--strategy zero1 --micro-batches 8 --updates 25 --evaluate-every 1",
    "ACCO by the clock": "--strategy acco --clock 1,64 --updates 16 --evaluate-every 1",
}
_SAMPLES = 5120
_DDP, _ZERO, _CLOCK = _TIME_ARMS
_TIME = seconds_to(0.5)
_TIMES = {
    arm: {
        "rate": Cell(words=words, measure=RATE, rates=_RATES, tuned_by=_TIME),
        "loss": Cell(words=words, measure=loss_at("samples", _SAMPLES), rates=_RATES, tuned_by=_TIME),
        "time": Cell(words=words, measure=_TIME, rates=_RATES, tuned_by=_TIME),
    }
    for arm, words in _TIME_ARMS.items()
}
_TIME_SCALE = (
    "a network of 19,810 parameters on digits; 4 virtual ranks, an exchange takes about ten micro-batches, rates tuned "
    "for each arm"
)


def _time(
    id: str,
    claim: str,
    says: str,
    of: Callable[[Reading], float],
    *,
    answer: str,
    differences: str = "virtual time; the paper's clusters had A100 and H100",
) -> Record:
    """Return the record of a share of time that ACCO needs less, which the abstract has as up to 87 %."""
    return Record(
        id=id,
        claim=claim,
        source="abstract",
        setting=_SLOW,
        cells=_TIMES,
        effects=(Effect(says=says, of=of, limits=Limits(least=0, paper=87, is_best=True)),),
        seeds=3,
        scale=_TIME_SCALE,
        differences=differences,
        answer=answer,
    )


_HETEROGENEOUS = (
    "digits-resnet --ranks 4 --slow 3=3 --network 10mbit --micro-batch-ms 10 --jitter 0.05 --task.width 8 "
    "--task.batch 8 --updates 30 --evaluate-every None"
)
_GROWING = (2, 4, 8, 16, 32)


def _growing(strategy: str) -> dict[str, Cell]:
    return {
        f"{ranks} workers": Cell(words=f"--strategy {strategy} --ranks {ranks}", measure=WAITED)
        for ranks in _GROWING
    }


def _bytes(strategy: str, ranks: int) -> Measure:
    """Return the bytes per parameter that a rank holds, all of them in 16 bits but for the optimizer: by the ledger."""
    chosen = STRATEGIES[strategy]()
    held = ledger_of(chosen).memory_bytes(chosen, parameter=2, accumulation=2, world_size=ranks)
    return Measure(unit="bytes a parameter", of=lambda _: held, digits=2)


def _memory(strategy: str, first: int) -> dict[str, Cell]:
    return {
        f"{ranks} workers": Cell(measure=_bytes(strategy, ranks), paper=first + 12 / ranks)
        for ranks in (2, 8, 32)
    }


ACCO_RECORDS = (
    Record(
        id="acco.quality",
        claim="ACCO's training curve is that of synchronous training",
        source="abstract; answer to review 5, on Figure 6",
        setting=_LONG,
        real=REAL,
        cells=_losses("synchronous", "ACCO"),
        effects=(_above("ACCO", Limits(least=-_EQUAL, most=_EQUAL)),),
        scale=f"{_AS_TEXT}; 2 virtual ranks, 1,500 updates",
        differences=_LEARNED,
        answer="Five other seeds, on another learning-rate schedule, ended 0.013 nats above, 0.005 to 0.021 "
        "([frontier](../benchmarks/results/2026-11-23-frontier/)).",
    ),
    Record(
        id="acco.wp",
        claim="ACCO outperforms the prediction of weights from the last gradient (ACCO-WP, SAPipe's second option)",
        source="answer to review 1, W2",
        setting=_TWO,
        real=REAL,
        cells=_losses("ACCO", "ACCO-WP"),
        effects=(
            Effect(
                says="ACCO-WP above ACCO, nats",
                of=lambda of: of("ACCO-WP", "held-out loss") - of("ACCO", "held-out loss"),
                limits=Limits(least=0),
                digits=3,
            ),
        ),
        scale=f"{_AS_TEXT}; 2 virtual ranks, 300 updates",
        differences=_LEARNED,
    ),
    Record(
        id="acco.dpu",
        claim="A delay of one step hurts transformers under AdamW (DPU)",
        source="abstract; answer to all reviews, point 1",
        setting=_TWO,
        real=REAL,
        cells=_losses("synchronous", "DPU"),
        effects=(_above("DPU", Limits(least=_EQUAL)),),
        scale=f"{_AS_TEXT}; 2 virtual ranks, 300 updates",
        differences=f"{_LEARNED}; no synchronous updates before",
    ),
    Record(
        id="acco.convolutions",
        claim="The same delay is harmless to a convolutional network under SGD",
        kind="answer",
        source="answer to review 5, on SAPipe's Figure 4",
        setting="digits-resnet --ranks 4 --network free --micro-batches 1 --updates 100 --task.width 8 "
        "--task.batch 16 --evaluate-every None",
        cells={
            arm: {"accuracy": Cell(words=f"--strategy {_ARMS[arm]}", measure=ACCURACY)}
            for arm in ("synchronous", "DPU")
        },
        effects=(
            Effect(
                says="points lost to the delay",
                of=lambda of: of("synchronous", "accuracy") - of("DPU", "accuracy"),
                limits=Limits(least=-1, most=1),
            ),
        ),
        seeds=MORE_SEEDS,
        scale="a network of 19,810 parameters on digits; 4 virtual ranks, 100 updates",
        differences="digits for ImageNet and CIFAR-10; SGD with momentum",
    ),
    _quality(8, 100, "0.007"),
    _quality(32, 40, "0.001"),
    _time(
        "acco.time",
        "ACCO takes up to 87 % less time",
        "less time for a sample than DDP, %",
        lambda of: 100 * (1 - of(_DDP, "rate") / of(_CLOCK, "rate")),
        answer="Counted per sample, against a loop that exchanges gradients for every micro-batch, as the released "
        "baseline does. The batch grows with the time of an exchange, so a sample is worth less.",
    ),
    _time(
        "acco.time-to-loss",
        "ACCO takes up to 87 % less time: to the same loss",
        "less time to the loss than DDP, %",
        lambda of: 100 * (1 - of(_CLOCK, "time") / of(_DDP, "time")),
        answer="ZeRO-1 with 8 micro-batches gets there sooner than ACCO by the clock, whose batch has grown further. "
        "What saves the time is the larger batch, and there is a best one.",
    ),
    _time(
        "acco.time-zero",
        "Compared to ZeRO, ACCO takes up to 87 % less time",
        "less time for a sample than ZeRO-1 with 8 micro-batches, %",
        lambda of: 100 * (1 - of(_ZERO, "rate") / of(_CLOCK, "rate")),
        answer="Who accumulates gradients already has most of what ACCO saves.",
        differences="virtual time; the baseline accumulates gradients, as one does on a slow network",
    ),
    Record(
        id="acco.heterogeneous",
        claim="Workers of different speeds are used: slow ones accumulate fewer micro-batches",
        source="abstract",
        setting=_HETEROGENEOUS,
        cells={
            title: {
                "rate": Cell(words=words, measure=RATE),
                "waited": Cell(words=words, measure=WAITED),
            }
            for title, words in {
                "synchronous": "--strategy zero1",
                "ACCO, 4 micro-batches": "--strategy acco",
                "ACCO by the clock": "--strategy acco --clock 1,16",
                "ACCO-WP by the clock": "--strategy wp --clock 1,16",
                "DPU by the clock": "--strategy dpu --clock 1,16",
            }.items()
        },
        effects=(
            Effect(
                says="times the samples of synchronous training",
                of=lambda of: of("ACCO by the clock", "rate") / of("synchronous", "rate"),
                limits=Limits(least=1),
                digits=2,
            ),
        ),
        seeds=3,
        scale="a network of 19,810 parameters on digits; 4 virtual ranks, one three times slower, 30 updates",
        differences="virtual time; one worker is slow, in the paper two kinds of GPU",
    ),
    Record(
        id="acco.figure3",
        claim="The share of communication in an update grows with the number of workers",
        source="Figure 3, by the answer to review 3",
        setting="digits-resnet --network 20mbit,1ms --micro-batch-ms 10 --jitter 0.05 --task.width 8 --task.batch 4 "
        "--updates 12 --evaluate-every None",
        cells={"synchronous": _growing("zero1"), "ACCO": _growing("acco")},
        effects=(
            Effect(
                says="points by which the share grows from 2 workers to 32",
                of=lambda of: of("synchronous", "32 workers") - of("synchronous", "2 workers"),
                limits=Limits(least=0),
            ),
        ),
        seeds=3,
        scale="a network of 19,810 parameters on digits; 2 to 32 virtual ranks, 12 updates",
        differences="virtual time; every rank has a link of its own, nothing is shared",
    ),
    Record(
        id="acco.hidden",
        claim="All communication is hidden",
        source="answer to review 5: 100 % overlap",
        setting=_SLOW,
        cells={
            _CLOCK: {"waited": Cell(words=_TIME_ARMS[_CLOCK], measure=WAITED, rates=_RATES, tuned_by=_TIME)}
        },
        effects=(
            Effect(says="% of the time waited", of=lambda of: of(_CLOCK, "waited"), limits=Limits(most=5)),
        ),
        seeds=3,
        scale=_TIME_SCALE,
        differences="virtual time",
        answer="By the clock; with fixed micro-batches only an exchange that is shorter than a round is hidden.",
    ),
    Record(
        id="acco.memory",
        claim="ACCO holds a sharded optimizer and one 16-bit buffer more than ZeRO-1: 6 + 12/N against 4 + 12/N bytes",
        source="Table 1, by the answers to reviews 3 and 4",
        cells={"ZeRO-1": _memory("zero1", 4), "ACCO": _memory("acco", 6)},
        effects=(
            Effect(
                says="bytes a parameter more than ZeRO-1, on 8 workers",
                of=lambda of: of("ACCO", "8 workers") - of("ZeRO-1", "8 workers"),
                limits=Limits(least=0, most=4),
                digits=2,
            ),
        ),
        scale="any model whose parameters and sums are in 16 bits",
        differences="the owner holds the mean gradient in fp32, for ACCO two of them; the paper counts neither",
    ),
    Record(
        id="acco.seconds",
        claim="Hours of pre-training GPT-Neo 125M and of tuning GPT-Neo 2.7B",
        source="Table 3, by the answers",
        told="in a table that no public text has",
        unchecked="the numbers are in no text that we could read, and are of 8 H100 and 32 A100",
    ),
    Record(
        id="acco.large",
        claim="GPT-Neo 2.7B tuned on Alpaca ends as with DDP",
        source="review 5",
        told="in a figure",
        unchecked="needs the model and GPUs; `stretto train language --preset acco-alpaca` is its setting",
    ),
)
