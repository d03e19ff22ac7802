"""Checkpoints of the Trainer of transformers at a signal (`enable_jit_checkpoint`)."""

from typing import Any

from transformers import trainer_jit_checkpoint


class JITCheckpointCallback(trainer_jit_checkpoint.JITCheckpointCallback):
    """The Trainer's own callback, which saves at the end of a step after a signal on any rank.

    Args:
        stock: The callback that the Trainer has made.
    """

    def __init__(self, stock: trainer_jit_checkpoint.JITCheckpointCallback) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as all of its methods
        self.trainer, self.jit_manager = stock.trainer, stock.jit_manager

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the end of the step."""

    on_pre_optimizer_step = on_step_begin

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save if any rank has received the signal."""
        manager, trainer = self.jit_manager, self.trainer
        if manager is None or trainer is None:
            return
        if not any(asked for (asked,) in trainer.by_rank([int(manager.is_checkpoint_requested)])):
            return
        control.should_save, control.should_training_stop = False, True
        # The manager marks a folder as incomplete while it saves. Ranks share the folder: if each of them took the
        # mark away, the first would while others still write, and the next would not find it.
        if args.should_save:
            manager.execute_jit_checkpoint()  # type: ignore[no-untyped-call]  # as above
        else:
            manager.is_checkpoint_requested = False
            trainer._save_checkpoint(trainer.model, trial=None)

    on_epoch_end = on_step_end
