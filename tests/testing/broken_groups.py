"""Process groups that must not pass: each spoils one thing that the group inside it does well."""

from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from stretto.groups.collective_group import CollectiveGroup, CompletedWork
from stretto.groups.collectives import method_of
from stretto.groups.private import private_group


class Spoiled(CollectiveGroup):
    """Passes everything on to an inner group."""

    may_wait_again = True

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

    def private(self) -> dist.ProcessGroup:
        return type(self)(private_group(self.inner))

    def allreduce(self, tensors: Any, *options: Any) -> dist.Work:
        return self.inner.allreduce(tensors, *options)

    def broadcast(self, tensors: Any, *options: Any) -> dist.Work:
        return self.inner.broadcast(tensors, *options)

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        return self.inner.allgather(outputs, inputs, *options)

    def all_gather_single(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        return method_of(self.inner, "all_gather_single")(output, input, *options)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        return method_of(self.inner, "reduce_scatter_single")(output, input, *options)

    def all_to_all_single(self, output: Tensor, input: Tensor, *splits: Any) -> dist.Work:
        return method_of(self.inner, "all_to_all_single")(output, input, *splits)

    def getBackendName(self) -> str:
        return "spoiled"

    def get_group_store(self) -> Store:
        return self.inner.get_group_store()

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    def abort(self) -> None:
        self.inner.abort()


class SwapsTwoRanksChunks(Spoiled):
    """Delivers the first rank's part of an all-to-all as the second's, and the other way round."""

    def all_to_all_single(self, output: Tensor, input: Tensor, *splits: Any) -> dist.Work:
        work = super().all_to_all_single(output, input, *splits)
        if self.size() == 1:
            return work
        work.wait()
        first, second, *_ = output.chunk(self.size())
        swapped = torch.cat([second, first])
        output[: len(swapped)] = swapped
        return CompletedWork([output])


class SumsInSixteenBits(Spoiled):
    """Adds float32 in bfloat16."""

    def allreduce(self, tensors: Any, *options: Any) -> dist.Work:
        (tensor,) = tensors
        if tensor.dtype != torch.float32:
            return super().allreduce(tensors, *options)
        narrow = tensor.bfloat16()
        super().allreduce([narrow], *options).wait()
        tensor.copy_(narrow)
        return CompletedWork([tensor])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        if output.dtype != torch.float32:
            return super().reduce_scatter_single(output, input, *options)
        narrow = output.bfloat16()
        super().reduce_scatter_single(narrow, input.bfloat16(), *options).wait()
        output.copy_(narrow)
        return CompletedWork([output])


class CompletesEarly(Spoiled):
    """Says that an all-gather is complete when it has begun, and performs it when the next one begins."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner)
        self.under_way: list[dist.Work] = []

    def all_gather_single(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        self.under_way.append(super().all_gather_single(output, input, *options))
        return Early(self.under_way[-1])


class Early(dist.Work):
    """Complete from the start for whoever asks with a timeout."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self.work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True if timeout else self.work.wait()

    def is_completed(self) -> bool:
        return True


class CompletesOutOfOrder(Spoiled):
    """Hands results of broadcasts and all-reduces to whoever waits first, whosever they are."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner)
        self.results: deque[tuple[dist.Work, Tensor]] = deque()

    def broadcast(self, tensors: Any, *options: Any) -> dist.Work:
        (tensor,) = tensors
        result = tensor.clone()
        self.results.append((super().broadcast([result], *options), result))
        return FirstCome(self.results, tensor)

    def allreduce(self, tensors: Any, *options: Any) -> dist.Work:
        (tensor,) = tensors
        result = tensor.clone()
        self.results.append((super().allreduce([result], *options), result))
        return FirstCome(self.results, tensor)


class FirstCome(dist.Work):
    """Takes the oldest result, as much of it as fits."""

    def __init__(self, results: deque[tuple[dist.Work, Tensor]], output: Tensor) -> None:
        super().__init__()
        self.results = results
        self.output = output

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        work, result = self.results[0]
        work.wait(timeout) if timeout else work.wait()
        self.results.popleft()
        fits = min(result.numel(), self.output.numel())
        self.output.view(-1)[:fits].copy_(result.view(-1)[:fits])
        return True

    def is_completed(self) -> bool:
        return self.results[0][0].is_completed()


class SharesWithItsSiblings(Spoiled):
    """Offers itself as its own private group."""

    def private(self) -> dist.ProcessGroup:
        return self


class QuietsNaN(Spoiled):
    """Passes gathered values through an addition, which changes what NaN and minus zero are made of."""

    def all_gather_single(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        super().all_gather_single(output, input, *options).wait()
        output += 0
        return CompletedWork([output])


class MistakesTheRoot(Spoiled):
    """Broadcasts from rank 0, whoever should."""

    def broadcast(self, tensors: Any, *options: Any) -> dist.Work:
        chosen = dist.BroadcastOptions()
        chosen.rootRank = 0
        return super().broadcast(tensors, chosen)


class CountsFromOne(Spoiled):
    """Numbers its ranks from 1."""

    def rank(self) -> int:
        return super().rank() + 1
