"""Arms that train on the same data with the same seeds, each at a learning rate tuned for it alone.

Every arm's learning rate is the best of a grid of factors of two, which grows while its edge is best, on seeds of
their own. Then all arms run on every seed that is compared. A run that is in runs.jsonl already is not repeated, so
that runs may be stopped at any time and go on.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echoed_run import Arm, Model, train

from stretto.errors import NonFinite
from stretto.recipes import TaskConfig

WIDENINGS = 2
"""How often a grid of learning rates grows by one where its edge is best."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and for how long."""

    config: Callable[[float], TaskConfig]
    """The recipe at a learning rate."""
    batch: int
    """Samples per rank and use."""
    loads: int
    """Fresh batches of each rank."""
    uses: float
    """Of a batch, on average: what the echoed arms are set to, and L / C of the modelled loader."""
    step_seconds: float
    """A rank's work on one batch in the model of time: about what one core took here, a round number."""
    rates: tuple[float, ...]
    """The grid of learning rates to begin with, rising by factors of two."""
    arms: tuple[str, ...]
    tuning_seeds: tuple[int, ...]
    """Apart from the seeds that are compared."""

    @property
    def model(self) -> Model:
        """A loader as slow as the mean echo can hide."""
        return Model(step_seconds=self.step_seconds, load_seconds=self.uses * self.step_seconds)


@dataclass(frozen=True)
class Run:
    """One run."""

    setting: str
    arm: str
    lr: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Settings, and what the arms in them are."""

    settings: Mapping[str, Setting]
    arm: Callable[[Setting, str, int], Arm]
    """What an arm does in a setting with a seed."""
    reference: str
    """The arm that sets the target loss, and whose costs of it the others' are multiples of."""
    references: Callable[[str], Mapping[str, str]]
    """Arms that an arm's loss is compared with, by what the column of the table is called."""
    results: str
    """Name of the file that `summarise` writes."""


class Book:
    """The runs that were made, one line each."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._experiment = experiment
        self._path = folder / "runs.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._runs = {_key(found): found for found in map(json.loads, lines)}

    def known(self, run: Run) -> dict[str, Any]:
        """Return what came of `run`; KeyError where it has not been made."""
        return self._runs[run]

    def result(self, run: Run) -> dict[str, Any]:
        """Return what came of `run`, making it where it has not been made."""
        if run not in self._runs:
            setting = self._experiment.settings[run.setting]
            try:
                found = train(
                    setting.config(run.lr), self._experiment.arm(setting, run.arm, run.seed), run.seed
                )
            except NonFinite:
                found = {"curve": []}
            self._runs[run] = {**asdict(run), **found}
            with self._path.open("a") as file:
                file.write(json.dumps(self._runs[run]) + "\n")
            print(f"{run.setting} {run.arm} lr {run.lr:g} seed {run.seed}: {final(found):.4f}", flush=True)
        return self._runs[run]

    def seeds(self, name: str, rates: Mapping[str, float]) -> list[int]:
        """Return the seeds with which all arms of a setting ran at `rates`, without those of the tuning."""
        ran = [
            {run.seed for run in self._runs if (run.setting, run.arm, run.lr) == (name, arm, rate)}
            for arm, rate in rates.items()
        ]
        return sorted(set.intersection(*ran) - set(self._experiment.settings[name].tuning_seeds))


def _key(found: dict[str, Any]) -> Run:
    return Run(found["setting"], found["arm"], found["lr"], found["seed"])


def final(found: dict[str, Any]) -> float:
    """Return the held-out loss at the end, in nats; infinite for a run that diverged."""
    loss = found["curve"][-1]["heldout_loss"] if found["curve"] else math.inf
    return loss if math.isfinite(loss) else math.inf


def tuned(
    setting: Setting, name: str, arm: str, result: Callable[[Run], dict[str, Any]]
) -> dict[float, float]:
    """Return an arm's mean final loss on the tuning seeds by learning rate, the best one first."""

    def mean(rate: float) -> float:
        return statistics.mean(final(result(Run(name, arm, rate, seed))) for seed in setting.tuning_seeds)

    losses = {rate: mean(rate) for rate in setting.rates}
    for _ in range(WIDENINGS):
        best = min(losses, key=losses.__getitem__)
        if best not in (min(losses), max(losses)):
            break
        wider = best * 2 if best == max(losses) else best / 2
        losses[wider] = mean(wider)
    return dict(sorted(losses.items(), key=lambda pair: pair[1]))


def run_all(experiment: Experiment, book: Book, settings: Sequence[str], seeds: int) -> None:
    """Tune all arms, then compare them, all arms of a seed after each other."""
    for name in settings:
        setting = experiment.settings[name]
        rates = {arm: next(iter(tuned(setting, name, arm, book.result))) for arm in setting.arms}
        for seed in range(seeds):
            for arm, rate in rates.items():
                book.result(Run(name, arm, rate, seed))
