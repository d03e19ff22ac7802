"""Arms that train on the same data with the same seeds, each at a learning rate tuned for it alone.

The learning rates of an arm are tried in factors of two, on seeds that serve for nothing else; while the best one is at
an edge of the grid, the grid grows. Then all arms run at their best rate with every seed that is compared. A run that
is in runs.jsonl is not made again, so that the script can be stopped at any time and go on.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echoed_run import Arm, Model, train
from papers.book import Book

from stretto.errors import NonFinite
from stretto_lab.recipes import TaskConfig

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
    """Uses of a batch, on average: of the echoed arms; and how many steps the modelled loader takes for a batch."""
    step_seconds: float
    """Time of a rank's work on one batch, in the model of time: about what one core takes, a round number."""
    rates: tuple[float, ...]
    """The grid of learning rates to begin with, rising by factors of two."""
    arms: tuple[str, ...]
    tuning_seeds: tuple[int, ...]
    """None of them is among the seeds that are compared."""

    @property
    def model(self) -> Model:
        """The machine, with a loader that is as slow as the mean number of uses can hide."""
        return Model(step_seconds=self.step_seconds, load_seconds=self.uses * self.step_seconds)


@dataclass(frozen=True)
class Run:
    """What decides a run; the fields by which its record is found."""

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
    """The arm that sets the target loss. What the others need to reach it is given in multiples of its costs."""
    references: Callable[[str], Mapping[str, str]]
    """Title of a column of the table to the arm that an arm's loss is compared with there."""
    results: str
    """Name of the file that `summarise` writes."""


class Runs:
    """The runs of an experiment, made where they have not been made before."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self._experiment = experiment
        self._book = Book(folder)

    def known(self, run: Run) -> dict[str, Any]:
        """Return the record of `run`.

        Raises:
            KeyError: It has not been made.
        """
        if (found := self._book.find(asdict(run))) is None:
            raise KeyError(run)
        return found

    def result(self, run: Run) -> dict[str, Any]:
        """Return the record of `run`; make the run where it has not been made."""
        if (found := self._book.find(asdict(run))) is not None:
            return found
        setting = self._experiment.settings[run.setting]
        try:
            made = train(setting.config(run.lr), self._experiment.arm(setting, run.arm, run.seed), run.seed)
        except NonFinite:
            made = {"curve": []}
        self._book.add({**asdict(run), **made})
        print(f"{run.setting} {run.arm} lr {run.lr:g} seed {run.seed}: {final(made):.4f}", flush=True)
        return self.known(run)

    def seeds(self, name: str, rates: Mapping[str, float]) -> list[int]:
        """Return the seeds with which all arms of a setting ran at `rates`, without those of the tuning."""
        ran = [
            {
                run["seed"]
                for run in self._book.runs
                if (run["setting"], run["arm"], run["lr"]) == (name, arm, rate)
            }
            for arm, rate in rates.items()
        ]
        return sorted(set.intersection(*ran) - set(self._experiment.settings[name].tuning_seeds))


def final(found: dict[str, Any]) -> float:
    """Return the held-out loss at the end, in nats; infinite for a run that diverged, which has no curve."""
    return found["curve"][-1]["heldout_loss"] if found["curve"] else math.inf


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


def run_all(experiment: Experiment, runs: Runs, settings: Sequence[str], seeds: int) -> None:
    """Tune all arms, then run them at their best rates, seed after seed."""
    for name in settings:
        setting = experiment.settings[name]
        rates = {arm: next(iter(tuned(setting, name, arm, runs.result))) for arm in setting.arms}
        for seed in range(seeds):
            for arm, rate in rates.items():
                runs.result(Run(name, arm, rate, seed))
