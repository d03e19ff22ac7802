"""What reviewers asked of the papers and nobody has answered with a number: our answers."""

import math
from collections.abc import Mapping
from typing import Literal

from stretto_lab.reproduce.acco import REAL as TEXT
from stretto_lab.reproduce.echo import CURVE, LOADS, loads
from stretto_lab.reproduce.echo import DIFFERENCES as ECHO_DIFFERENCES
from stretto_lab.reproduce.echo import IMAGES as ECHOED
from stretto_lab.reproduce.echo import REAL as ECHO_REAL
from stretto_lab.reproduce.echo import SCALE as ECHO_SCALE
from stretto_lab.reproduce.measures import ACCURACY, LOSS
from stretto_lab.reproduce.paft_tables import (
    DIFFERENCES,
    REAL,
    SAME,
    SCALE,
    SMALL,
    VARIANCES,
    lost,
    noised,
    table_1,
)
from stretto_lab.reproduce.record import Cell, Effect, Record
from stretto_lab.reproduce.verdict import Limits

_SPLIT = (
    "stdlib-gpt --ranks 1 --network free --updates 160 --micro-batches 4 --clip-norm 1 --evaluate-every None "
    "--task.size 0.1m --task.context 64 --task.batch 4 --task.lr 0.008 --task.schedule.warmup 16 "
    "--task.evaluation-windows 256 --task.data.megabytes 2"
)
_SPLIT_ROWS = {
    "synchronous": "zero1",
    "first of 4 at the estimate": "acco:first=1",
    "2 of 4": "acco:first=2",
    "3 of 4": "acco:first=3",
}


def _hit(variance: str) -> dict[str, str]:
    return {
        "PAFT-Sync H = 10": noised("PAFT-Sync H = 10", variance),
        "H = 10, averages hit too": f"--strategy paft-sync:interval=10 --noise {variance},averages={variance}",
        "weights averaged instead, averages hit": f"--strategy local:rate=1 --noise 0,averages={variance}",
    }


_WEIGHTS = "weights averaged instead, averages hit"
_HIT = {
    row: {variance: Cell(words=_hit(variance)[row], measure=ACCURACY) for variance in VARIANCES[:3]}
    for row in _hit("0")
}
_INSTEAD = {**table_1("DSGD", "PAFT-Sync H = 10"), _WEIGHTS: _HIT[_WEIGHTS]}
_CLIPPED = {
    **{row: {"1e-2": table_1(row)[row]["1e-2"]} for row in ("DSGD", "Noised DSGD", "PAFT-Sync H = 10")},
    "Noised DSGD, clipped at 1": {
        "1e-2": Cell(words=f"{noised('Noised DSGD', '1e-2')} --clip-norm 1", measure=ACCURACY)
    },
    "PAFT-Sync H = 10, clipped at 1": {
        "1e-2": Cell(words=f"{noised('PAFT-Sync H = 10', '1e-2')} --clip-norm 1", measure=ACCURACY)
    },
}


def _of_averages(
    *,
    id: str,
    claim: str,
    source: str,
    cells: Mapping[str, Mapping[str, Cell]],
    effects: tuple[Effect, ...],
    answer: str,
    kind: Literal["question", "answer"] = "question",
) -> Record:
    return Record(
        id=id,
        claim=claim,
        kind=kind,
        source=source,
        setting=SMALL,
        real=REAL,
        cells=cells,
        effects=effects,
        scale=SCALE,
        differences=DIFFERENCES,
        answer=answer,
    )


QUESTIONS = (
    Record(
        id="acco.split",
        claim="How does the split of the batch matter?",
        kind="question",
        source="reviews 1 and 3 of ACCO",
        setting=_SPLIT,
        real=TEXT,
        cells={
            row: {"held-out loss": Cell(words=f"--strategy {arm}", measure=LOSS)}
            for row, arm in _SPLIT_ROWS.items()
        },
        effects=(
            Effect(
                says="nats by which 1 of 4 ends above 3 of 4",
                of=lambda of: (
                    of("first of 4 at the estimate", "held-out loss") - of("3 of 4", "held-out loss")
                ),
                limits=Limits(least=0),
                digits=3,
            ),
        ),
        scale="a byte model of 0.1 million parameters; one rank, 160 updates of 4 micro-batches",
        differences="the paper has halves alone",
        answer="The more gradients make the estimate, the nearer it is to the committed parameters. But a round has "
        "to be long enough to hide an exchange, and a small second half is not. The claim that is judged is ours.",
    ),
    _of_averages(
        id="paft.sharded",
        claim="Why not avoid the divergence altogether? A sharded optimizer (ZeRO-1) undoes most of the damage",
        source="reviews 1 and 3 of PAFT",
        cells=table_1("DSGD", "Noised DSGD", "PAFT-Sync H = 10", "ZeRO-1"),
        effects=(
            Effect(
                says="share of the lost points that ZeRO-1 gives back, σ² = 1e-2, %",
                of=lambda of: (
                    100
                    * (of("ZeRO-1", "1e-2") - of("Noised DSGD", "1e-2"))
                    / (of("DSGD", "1e-2") - of("Noised DSGD", "1e-2"))
                ),
                limits=Limits(least=50),
            ),
        ),
        answer="Every coordinate has one owner, whose values all ranks install: replicas cannot part. An average also "
        "divides the noise by the number of workers, which sharding does not. The claim that is judged is ours.",
    ),
    _of_averages(
        id="paft.hit-averages",
        claim="Noise on the averages themselves matters much less than noise on gradients",
        kind="answer",
        source="answer to review 4 of PAFT",
        cells=_HIT,
        effects=tuple(
            lost(variance, "H = 10, averages hit too", Limits(most=SAME), to="PAFT-Sync H = 10")
            for variance in VARIANCES[:3]
        ),
        answer="What noisy gradients leave in the weights has a factor η², noise on the weights has none. With "
        "`verified=True` an average is checked on its way.",
    ),
    _of_averages(
        id="paft.weights-instead",
        claim="Why not average weights at every update, instead of gradients? At equal noise that is the worse "
        "place to be hit",
        source="reviews 1 and 3 of PAFT",
        cells=_INSTEAD,
        effects=(lost("1e-3", _WEIGHTS, Limits(least=SAME), to="PAFT-Sync H = 10"),),
        answer="The claim that is judged is ours.",
    ),
    _of_averages(
        id="paft.clipping",
        claim="Clipping mitigates large errors",
        kind="answer",
        source="answer to review 1 of PAFT, Q4",
        cells=_CLIPPED,
        effects=(lost("1e-2", "Noised DSGD", Limits(least=SAME), to="Noised DSGD, clipped at 1"),),
        answer="The noise is most of the norm that is clipped, so that every step becomes shorter: a smaller learning "
        "rate. That alone saves much, but less than averages do, and together with averages it costs accuracy. Damage "
        "that comes after the norm has been taken is out of a clip's reach.",
    ),
    Record(
        id="echo.loads-saved",
        claim="How do loads saved depend on p, with a rate tuned for each?",
        kind="question",
        source="review 2 of echoing",
        setting=ECHOED,
        real=ECHO_REAL,
        cells=CURVE,
        effects=(
            Effect(
                says="power of 1/p that the speed-up follows, from p = 1 to 1/4",
                of=lambda of: math.log(loads(of, 4, "near")) / math.log(4),
                limits=Limits(least=0, most=0.9),
                digits=2,
            ),
        ),
        scale=ECHO_SCALE,
        differences=ECHO_DIFFERENCES,
        answer=f"Over {LOADS} loads they grow with a power of 1/p below one. The claim that is judged is ours.",
    ),
)
