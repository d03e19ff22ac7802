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

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save if any rank was asked to."""
        if self._is_asked():
            control.should_save, control.should_training_stop = False, True
            self._save(args)

    on_epoch_end = on_step_end

    def _is_asked(self) -> bool:
        if self.jit_manager is None or self.trainer is None:
            return False
        return any(asked for (asked,) in self.trainer.by_rank([int(self.jit_manager.is_checkpoint_requested)]))

    def _save(self, args: Any) -> None:
        # The manager marks a folder as incomplete while it saves. Ranks share the folder: if each of them took the
        # mark away, the first would while others still write, and the next would not find it.
        if args.should_save:
            self.jit_manager.execute_jit_checkpoint()
        else:
            self.jit_manager.is_checkpoint_requested = False
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
