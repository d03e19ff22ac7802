"""Layers that communicate themselves, in addition to the job."""

from torch import distributed as dist
from torch import nn

from stretto.errors import UnsupportedModel
from stretto.groups import may_wait_again
from stretto.strategies import Strategy


def check_messages(model: nn.Module, strategy: Strategy, group: dist.ProcessGroup) -> None:
    """Raise if a layer communicates in forward passes while a lane also sends, over NCCL.

    NCCL requires the operations of several communicators in the same order on all ranks, unless they do not overlap. A
    lane that overlaps keeps no such order with the forward pass. Gloo has no such rule.

    Args:
        model: The user's model.
        strategy: The job's strategy.
        group: The job's group.

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
