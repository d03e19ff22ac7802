"""A second lane of one rank's job, which sends while the user's thread continues stepping."""

from stretto.engine.runtime import Runtime, RuntimeOver


class WithLaneBeside(RuntimeOver):
    """A runtime that ends together with a second lane.

    Args:
        runtime: Of the job's rounds.
        beside: Performs its pieces of work there, one after the other.
    """

    def __init__(self, runtime: Runtime, beside: Runtime) -> None:
        super().__init__(runtime)
        self.beside = beside

    def join(self) -> None:
        """Wait for both lanes, then end them."""
        super().join()
        self.beside.join()

    def leave(self) -> None:
        """End both lanes after an error, without waiting."""
        super().leave()
        self.beside.leave()
