"""A second lane of one rank's job, for what is sent beside the user's thread while that continues stepping."""

from stretto.engine.runtime import Runtime, RuntimeOver


class WithLaneBeside(RuntimeOver):
    """A runtime that ends together with a lane beside it.

    Args:
        runtime: Of the job's rounds.
        beside: Performs what is handed to it there, one piece after the other.
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
