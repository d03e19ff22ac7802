"""Checkpoints of the Trainer of transformers at a signal (`enable_jit_checkpoint`)."""

from typing import Any

from transformers import trainer_jit_checkpoint


class JITCheckpointCallback(trainer_jit_checkpoint.JITCheckpointCallback):
    """The Trainer's own, which saves at the end of a step, when a signal has reached any rank.

    Args:
        stock: The one that the Trainer has made.
    """

    def __init__(self, stock: trainer_jit_checkpoint.JITCheckpointCallback) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as all of its methods
        self.trainer, self.jit_manager = stock.trainer, stock.jit_manager

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the end of the step."""

    on_pre_optimizer_step = on_step_begin

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Save if any rank was asked to."""
        self._agree()
        super().on_step_end(*args, **kwargs)  # type: ignore[no-untyped-call]  # as above

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """Save if any rank was asked to since."""
        self._agree()
        super().on_epoch_end(*args, **kwargs)  # type: ignore[no-untyped-call]  # as above

    def _agree(self) -> None:
        if self.jit_manager is not None and self.trainer is not None:
            found = self.trainer.by_rank([int(self.jit_manager.is_checkpoint_requested)])
            self.jit_manager.is_checkpoint_requested = any(asked for (asked,) in found)
