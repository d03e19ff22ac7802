"""Layers that send their own messages, in addition to a job's messages."""

from torch import distributed as dist
from torch import nn

from stretto.errors import UnsupportedModel
from stretto.groups import may_wait_again
from stretto.strategies import Strategy


def check_messages(model: nn.Module, strategy: Strategy, group: dist.ProcessGroup) -> None:
    """Raise where a layer sends during forward passes while a lane sends too, over NCCL.

    NCCL wants the operations of several communicators in one order on all ranks, or not at once. A lane that overlaps
    keeps no such order with the forward pass. Gloo has no such rule.

    Args:
        model: Of the user.
        strategy: Of the job.
        group: Of the job.

    Raises:
        UnsupportedModel: There is such a layer, and the strategy overlaps.
    """
    sending = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if not strategy.overlaps or not sending or group.size() == 1:
        return
    if may_wait_again(group, next(model.parameters()).device):
        return
    raise UnsupportedModel(
        f"model: expected no SyncBatchNorm under {strategy}, which exchanges during forward passes, found "
        f"{sending[0]!r}: over NCCL the messages of both may wait for each other; use BatchNorm, or a "
        "strategy without overlap, such as ZeRO1()"
    )
