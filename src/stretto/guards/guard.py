"""The contract of a guard: coroutines over effects, and its options."""

import dataclasses
from abc import ABC, abstractmethod
from typing import ClassVar

from stretto.guards.effects import GuardScript


@dataclasses.dataclass(frozen=True, slots=True)
class Appointment:
    """That a round is to be audited, and by whom."""

    distance: int
    """Every rank's auditor is the one so many ranks further; 0 on a single rank, which audits itself."""
    tolerance: float
    """Of the 2-norm, where no rank repeats its own gradient to the bit."""


class Guard(ABC):
    """What is checked between updates, and what is done about damage.

    A subclass is a frozen dataclass of options with a generator, `after_update`, and where needed further ones. They
    run on the communication lane and yield the effects of `stretto.guards.effects`, which the lane performs and
    answers. A guard holds no state between calls and touches no tensor: what is to be remembered is held by the lane
    (`Seal`).

    Note [One path]
        Collective effects must be asked for by all ranks alike. A guard may branch on its options and on the answers of
        collective effects, which are the same on every rank; on a local answer it may branch only around effects that
        are not collective.

    Note [When]
        at_start        before the first update, and whenever state has been loaded from a checkpoint;
        after_reduce    once per round, when the round's gradient has been summed;
        before_step     ahead of every `Step` and every `Preview`, before the reduced gradient, masters and optimizer
                        state are read again;
        after_update    once per update, when its last values have been published or gathered and before the model
                        shows them; also where the update had no weight and nothing was stepped.

        Within each moment guards run in the order in which the user gave them.
    """

    name: ClassVar[str]
    """The one spelling: row in the tables, `Verdict.guard`."""
    overlaps: ClassVar[bool] = False
    """Whether the guard may run beside the gradients of the next update. One that must speak before values are shown
    says False: it waits where its strategy waits, and is hidden where its strategy is."""
    needs_replicas: ClassVar[bool] = False
    """Whether it compares ranks with each other, so that only strategies with a replicated optimizer may have it."""
    needs_equal_parameters: ClassVar[bool] = False
    """Whether all ranks have to show the same parameters, so that strategies that step alone may not have it."""
    watches_shown: ClassVar[bool] = False
    """Whether the compute lane is to compare, at the end of every round's micro-batches, the model's parameters with
    what was installed, and to leave gradients out that were taken at damaged ones."""

    needs_rounds: ClassVar[bool] = False
    """Whether it runs rounds again, so that micro-batches have to come by way of `DataParallel.micro_batch`; a guard
    that `watches_shown` makes use of that where they do."""

    @property
    def rehearses_step(self) -> bool:
        """Whether every step is computed ahead on copies, segment by segment, so that `Recompute` knows its outcome."""
        return False

    @abstractmethod
    def after_update(self) -> GuardScript:
        """Yield what is to be done at the end of an update."""

    def audit(self, round_index: int, world_size: int) -> Appointment | None:
        """Return who is to take whose micro-batches of a round again; nobody, unless overridden.

        Decided from the options and the arguments alone, which all ranks hold alike.
        """
        return None

    def at_start(self) -> GuardScript:
        """Yield what is to be done with the state that training starts from; nothing, unless overridden.

        No values have been published yet, so `Fingerprint` and `Copy` may not be asked for.
        """
        yield from ()

    def after_reduce(self) -> GuardScript:
        """Yield what is to be done when a gradient has been summed; nothing, unless overridden."""
        yield from ()

    def before_step(self) -> GuardScript:
        """Yield what is to be done before gradient, masters and state are read; nothing, unless overridden."""
        yield from ()
