"""Every error that Stretto raises on purpose, in one tree.

    StrettoError
      ConfigError (ValueError)              impossible, contradictory or unsupported settings
        UnknownName                         a recipe, strategy or field that does not exist
        MissingExtra (ImportError)          an optional dependency is not installed
        UnsupportedModel                    no trainable parameter, complex or integer parameters, DTensors
        UnsupportedOptimizer                cannot be cut into shards, or does not fit the model
        RanksDisagree                       models, strategies or settings differ between ranks
          WorkerDisagrees                   settings differ inside a node whose ranks step one replica
      UsageError (ValueError)               calls in an order that would corrupt the run
        LossNotScalar
        StepWithoutBackward
        GradientsTouched                    user code clipped, replaced or changed gradients
        ParametersTouched                   parameters were replaced or written after wrapping
        OptimizerStepped                    user code stepped the optimizer
        EstimateShown                       a call needs committed parameters, but the model shows an estimate
        Finished                            use after `finish` or after an error
        OutOfTurn                           a call, save or settling at the wrong moment
        BatchChanged                        a batch was written in place before its next use
        UnusedParameters                    parameters that no rank has used
      NonFinite (ArithmeticError)           a loss or gradient is not finite
        ReplicaNonFinite                    on a rank that steps alone; the other ranks raise it too
      CommunicationError (RuntimeError)
        PeerFailed                          another rank died or raised
        PeerSilent (TimeoutError)           another rank stopped answering
        LeftOut                             the other ranks continue without this process
        NoWayOn                             ranks of a virtual cluster cannot continue together
          CollectivesDisagree               ranks called different collectives
          Deadlock                          no rank can continue
      CorruptionError (RuntimeError)        values changed where nothing may change them, and the job ends
        TransferCorrupt                     every allowed repeat arrived damaged
        StateCorrupt                        masters or optimizer state damaged beyond repair
        ReplicasDiverged                    replicas differ, and no majority shows which rank is right
        Quarantined                         repaired every time, but too often attributed to one rank or link
      CheckpointError (RuntimeError)
        TornCheckpoint                      incomplete or damaged
        ForeignCheckpoint                   of another model, layout or format version
      UnsafeValue (ValueError)              bytes that only pickle could read, which may run anything
      DiskError (OSError)                   a file cannot be written
      OutputClosed (OSError)                the reader of a command's output is gone
      WorkerFailed (RuntimeError)           a local worker process ended with an error
      ConformanceFailed (AssertionError)    a campaign's clean job failed, or guards changed it

A message says where (rank, step), the expected and the found value, and the remedy.
"""

from collections.abc import Sequence

from stretto.terminal import printable


class StrettoError(Exception):
    """Root of the tree: `except StrettoError` catches everything the library raises on purpose."""

    def __str__(self) -> str:
        """Return the message; text from other ranks and file names in it cannot control a terminal."""
        return printable(super().__str__())


class ConfigError(StrettoError, ValueError):
    """A setting is impossible, contradictory or not supported."""


class UnknownName(ConfigError):
    """A name (recipe, strategy, field) that does not exist; the message lists the existing names."""


class MissingExtra(ConfigError, ImportError):
    """An optional dependency is missing; the message gives the install command."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: pip install 'stretto[{extra}]'")


class UnsupportedModel(ConfigError):
    """The model has no trainable parameter, or parameters that data-parallel training cannot average."""


class UnsupportedOptimizer(ConfigError):
    """The optimizer cannot be cut into shards, or its parameters are not the model's."""


class RanksDisagree(ConfigError):
    """Models, strategies or settings differ between ranks."""


class WorkerDisagrees(RanksDisagree):
    """Settings differ between the ranks of a node that step one replica together; ranks of other nodes raise it too."""


class UsageError(StrettoError, ValueError):
    """A call in an order, or a change of state, that would corrupt the run."""


class LossNotScalar(UsageError):
    """`backward` received a loss that is not a one-element floating-point tensor."""


class StepWithoutBackward(UsageError):
    """`step` was called without a gradient since the last step."""


class GradientsTouched(UsageError):
    """Gradients were clipped, zeroed, replaced or changed outside `backward`."""


class ParametersTouched(UsageError):
    """Parameters were rebound, replaced or written after wrapping."""


class OptimizerStepped(UsageError):
    """The user's optimizer was stepped by hand."""


class EstimateShown(UsageError):
    """A call needs committed parameters, but the model shows an estimate."""


class Finished(UsageError):
    """The job was used after `finish` or after an error ended it."""


class OutOfTurn(UsageError):
    """A call, save or settling came at the wrong moment."""


class BatchChanged(UsageError):
    """A batch was written in place before its next use."""


class UnusedParameters(UsageError):
    """Some parameters received no gradient on any rank."""


class NonFinite(StrettoError, ArithmeticError):
    """A loss or a gradient is not finite; the message names the ranks and the step."""


class ReplicaNonFinite(NonFinite):
    """A loss or a gradient of a worker that steps alone is not finite; the other ranks raise it too."""


class CommunicationError(StrettoError, RuntimeError):
    """A collective failed."""


class PeerFailed(CommunicationError):
    """Another rank died or raised an error; the message includes the cause if that rank reported one.

    Args:
        message: The text of the error.
        ranks: The dead ranks, if this rank found them itself.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class PeerSilent(CommunicationError, TimeoutError):
    """Another rank stopped answering within the timeout.

    Args:
        message: The text of the error.
        ranks: The silent ranks, if known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class LeftOut(CommunicationError):
    """The other ranks have agreed to continue without this process, or the job has ended.

    Args:
        message: The text of the error.
        is_over: Whether the job has ended, so that no process can join.
        is_asked: Whether this process left on request.
    """

    def __init__(self, message: str, *, is_over: bool = False, is_asked: bool = False) -> None:
        super().__init__(message)
        self.is_over, self.is_asked = is_over, is_asked


class CorruptionError(StrettoError, RuntimeError):
    """Values were corrupted, beyond repair or too often.

    Args:
        message: The text of the error.
        ranks: The ranks to which the damage is attributed, if known.
        links: Sender and receiver of damaged links.
        incidents: The incidents that led to it, each a `stretto.Incident`.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int] = (),
        links: Sequence[tuple[int, int]] = (),
        incidents: Sequence[object] = (),
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.links = tuple(links)
        self.incidents = tuple(incidents)


class TransferCorrupt(CorruptionError):
    """A transfer was repeated as often as allowed and always arrived damaged; the message names sender and link."""


class StateCorrupt(CorruptionError):
    """Masters or optimizer state are damaged beyond repair; the message names rank and tensor."""


class ReplicasDiverged(CorruptionError):
    """Replicas differ, and no majority of ranks shows which is right."""


class Quarantined(CorruptionError):
    """Damage was attributed to the same rank or link as often as allowed; all of it was repaired."""


class NoWayOn(CommunicationError):
    """The ranks of a virtual cluster cannot continue together; the message has a row for each of them."""

    def __init__(self, what: str, rows: Sequence[object]) -> None:
        super().__init__("\n  ".join([what, *map(str, rows)]))
        self.rows = tuple(rows)
        """The state of each rank, in rank order: `stretto_lab.virtual.RankStatus`."""


class CollectivesDisagree(NoWayOn):
    """Ranks called one collective with different operations, sizes, dtypes or roots."""


class Deadlock(NoWayOn):
    """No rank can continue: each waits for another rank, or for a rank that has returned."""


class CheckpointError(StrettoError, RuntimeError):
    """A checkpoint cannot be written or read."""


class TornCheckpoint(CheckpointError):
    """A checkpoint is incomplete or damaged."""


class ForeignCheckpoint(CheckpointError):
    """A checkpoint belongs to another model, layout or format version."""


class UnsafeValue(StrettoError, ValueError):
    """Bytes from a file or another rank that only pickle could read, or a value that only pickle could write."""


class DiskError(StrettoError, OSError):
    """A file cannot be written; the message names it and the cause."""


class OutputClosed(StrettoError, OSError):
    """The reader of a command's output is gone: the reader of a pipe has ended, or a terminal was closed."""

    def __init__(self) -> None:
        super().__init__(
            "the pipe or terminal of the output is closed, so the command ends here; write to a file to let "
            "it run: > output.log"
        )


class WorkerFailed(StrettoError, RuntimeError):
    """A local worker process ended with an error; the message names its rank and the cause.

    Args:
        message: The text of the error.
        damages: The errors that workers raised because of damaged values.
    """

    def __init__(self, message: str, damages: Sequence[CorruptionError] = ()) -> None:
        super().__init__(message)
        self.damages = tuple(damages)


class ConformanceFailed(StrettoError, AssertionError):
    """A clean job failed, or guards changed it; the message gives the expected and the found value."""
