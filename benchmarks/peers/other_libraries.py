"""Methods of other libraries to compare with: Accelerate's local SGD, torchft's DiLoCo, and averages by hivemind.

They are arms of a comparison, as anybody's are:

    stretto compare stdlib-gpt --strategies acco,benchmarks/peers/other_libraries.py:HivemindAverages:interval=4:delay=1
"""

import contextlib
import dataclasses
import multiprocessing
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from stretto.errors import CommunicationError, ConfigError
from stretto.fields import check_at_least, check_fields
from stretto.groups import ThrottledGroup, announce_rank
from stretto.groups.collectives import method_of
from stretto.records import Update
from stretto_lab.peers.stock import Replicas, TorchDDP

_PATIENCE = timedelta(minutes=10)
"""What a library may wait for the other ranks; its own default would give up an exchange on a slow link."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AccelerateOptions:
    """What can be set for Accelerate's local SGD."""

    interval: int = 10
    """Updates from one average of the replicas to the next (`local_sgd_steps`)."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, interval=1)


class AccelerateLocalSGD(Replicas, TorchDDP):
    """`accelerate.local_sgd.LocalSGD`: ranks step alone; averages of the replicas, tensor by tensor, hold them up.

    It averages over torch's default group, whatever the rank's device.
    """

    name = "accelerate-local-sgd"
    options_type = AccelerateOptions

    def wrap(self, model: nn.Module) -> nn.Module:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        wrapped = super().wrap(model)
        self.measured = (self.group, dist.group.WORLD)
        announce_rank(self.rank, self.world_size)
        threads = torch.get_num_threads()
        accelerator = Accelerator(cpu=next(model.parameters()).device.type == "cpu")
        torch.set_num_threads(threads)  # it sets as many as there are cores
        self._averages = LocalSGD(
            accelerator=accelerator, model=wrapped, local_sgd_steps=self.options.interval
        )
        self._averages.__enter__()  # its `__exit__` would average once more, after the last update
        return wrapped

    def prepare(self, is_last: bool) -> None:
        """Leave DDP as it is: the context has switched it off."""

    def step(self) -> None:
        self.optimizer.step()
        self._averages.step()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TorchftOptions:
    """What can be set for torchft's DiLoCo."""

    interval: int = 10
    """Updates from one outer step of a fragment to its next (`sync_every`)."""
    fragments: int = 1
    """Parts of the model that travel in turn, about equally large."""
    delay: int = 0
    """Updates between a fragment's departure and its landing (`fragment_sync_delay`)."""
    mix: float = 0.0
    """What stays of a rank's own values at a landing (`fragment_update_alpha`)."""
    outer_lr: float = 0.7
    """Learning rate of the outer step."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the outer step."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, interval=1, fragments=1, delay=0, mix=0.0, outer_lr=0.0, outer_momentum=0.0)
        # Torchft refuses these too, but behind the start of its servers, which other ranks then wait for.
        if self.interval % self.fragments or not self.delay < self.interval // self.fragments or self.mix > 1:
            raise ConfigError(
                f"torchft-diloco: interval={self.interval}, fragments={self.fragments}, delay={self.delay}, "
                f"mix={self.mix}: expected fragments that divide the interval, a delay below interval / fragments, and "
                "a mix up to 1"
            )


class TorchftDiLoCo(Replicas):
    """`torchft.local_sgd.DiLoCo`: outer steps of a fragment at a time, beside the next updates if there is a delay.

    Every rank is a replica group of torchft's with a manager; rank 0 has the lighthouse. The all-reduces, one for each
    parameter and in fp32, go over the group of the job. What a rank changes during the delay is lost but for `mix`.
    """

    name = "torchft-diloco"
    options_type = TorchftOptions

    def wrap(self, model: nn.Module) -> nn.Module:
        os.environ.setdefault("RUST_LOG", "warn")  # or it prints several lines for each of its exchanges
        from torchft.local_sgd import DiLoCo

        options = self.options
        fragments = _fragments(model, options.fragments)
        outer = [
            torch.optim.SGD(
                fragment.parameters(),
                lr=options.outer_lr,
                momentum=options.outer_momentum,
                nesterov=options.outer_momentum > 0,
            )
            for fragment in fragments
        ]
        self._manager = self._new_manager()
        self._diloco = DiLoCo(
            self._manager,
            fragments,
            self.optimizer,
            outer,
            sync_every=options.interval,
            fragment_sync_delay=options.delay,
            fragment_update_alpha=options.mix,
        )
        self._diloco.__enter__()  # hooks of the optimizer do all else
        return model

    def _new_manager(self) -> Any:
        """Return this rank's manager, which has found the lighthouse."""
        from torchft.coordination import LighthouseServer
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupWrapper

        group = self.group

        class OverTheJob(ProcessGroupWrapper):
            """Torchft makes a group when its members change, and here they never do."""

            def _create_pg(self, store: Any, rank: int, world_size: int) -> dist.ProcessGroup:
                return group

        address, shared = _own_address(), self._control.get_group_store()
        self._lighthouse = None
        if self.rank == 0:
            self._lighthouse = LighthouseServer(bind="[::]:0", min_replicas=self.world_size)
            shared.set("lighthouse", f"http://{address}:{self._lighthouse.address().rpartition(':')[2]}")
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return Manager(
            pg=OverTheJob(timeout=_PATIENCE),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=self.world_size,
            use_async_quorum=False,
            timeout=_PATIENCE,
            quorum_timeout=_PATIENCE,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self._store.port,
            lighthouse_addr=shared.get("lighthouse").decode(),
            replica_id=f"rank{self.rank}_",
            hostname=address,
            init_sync=False,
        )

    def finish(self) -> list[Update]:
        """End the job; fragments under way are dropped."""
        self._diloco.__exit__(None, None, None)
        self._manager.shutdown(wait=False)
        ended = super().finish()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
        return ended


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HivemindOptions:
    """What can be set for averages by hivemind."""

    interval: int = 10
    """Updates from one average of the replicas to the next."""
    delay: int = 0
    """Updates between the departure of an average and its landing; 0 waits. Below the interval."""
    compression: Literal["none", "float16", "uniform8bit"] = "float16"
    """What travels; hivemind's documentation advises 16 bits, or 8, which fail in hivemind 1.1.12 with NumPy 2.4."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, interval=1, delay=0)
        if self.delay >= self.interval:
            raise ConfigError(f"delay={self.delay}: expected below the interval, {self.interval}")


class HivemindAverages(Replicas):
    """`hivemind.averaging.DecentralizedAverager`: ranks find each other, and average their replicas in the background.

    What a rank has changed meanwhile is kept, as `hivemind.Optimizer` does with delayed averages of local updates. That
    optimizer itself decides by the clock after how many updates it averages; here a count does, so that runs can be
    compared. Hivemind has sockets and processes of its own: `sent_bytes` does not count what they send.
    """

    name = "hivemind"
    options_type = HivemindOptions
    patience = _PATIENCE

    def wrap(self, model: nn.Module) -> nn.Module:
        if isinstance(self.group, ThrottledGroup) and not self.group.link.is_free:
            raise ConfigError(
                f"hivemind opens sockets of its own, which are not as slow as the link {self.group.link}: leave "
                "--link out, or use network namespaces"
            )
        if self.world_size == 1:
            raise ConfigError("hivemind finds a group of 2 ranks or more; this job has 1")
        import hivemind
        from hivemind import averaging, compression

        formats = {
            "none": compression.NoCompression,
            "float16": compression.Float16Compression,
            "uniform8bit": compression.Uniform8BitQuantization,
        }
        packing = formats[self.options.compression]()
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.check_packing(packing)
        self._left: list[Tensor] = []
        self._average: Any = None
        shared = self._control.get_group_store()
        with _forked_processes():
            self._dht = hivemind.DHT(
                initial_peers=[] if self.rank == 0 else [shared.get("hivemind").decode()],
                host_maddrs=[f"/ip4/{_own_address()}/tcp/0"],
                start=True,
                use_relay=False,
                auto_nat=False,
                nat_port_map=False,
            )
            if self.rank == 0:
                shared.set("hivemind", str(self._dht.get_visible_maddrs()[0]))
            self._averager = averaging.DecentralizedAverager(
                [parameter.detach().clone() for parameter in self._parameters],
                self._dht,
                start=True,
                prefix="stretto",
                target_group_size=self.world_size,
                min_group_size=self.world_size,
                compression=packing,
                allreduce_timeout=self.patience.total_seconds(),
                next_chunk_timeout=self.patience.total_seconds(),
                allow_state_sharing=False,
            )
        return model

    def check_packing(self, packing: Any) -> None:
        """Pack a few numbers as the parameters will be.

        Where that fails in an average, some ranks wait for a long time for what never comes.

        Raises:
            ConfigError: Hivemind cannot pack a dtype of the model with this compression.
        """
        from hivemind.compression import CompressionInfo, deserialize_torch_tensor

        for dtype in {parameter.dtype for parameter in self._parameters}:
            few = torch.linspace(-1, 1, 8, dtype=dtype)
            try:
                deserialize_torch_tensor(packing.compress(few, CompressionInfo.from_tensor(few)))
            except Exception as error:
                raise ConfigError(
                    f"rank {self.rank}: hivemind cannot send {dtype} with compression={self.options.compression}: "
                    f"{error}; expected another compression, or other versions of hivemind and NumPy"
                ) from error

    def step(self) -> None:
        self.optimizer.step()
        position = (self.steps + 1) % self.options.interval
        if self._left and position == self.options.delay:
            self._land()
        if position == 0:
            self._launch()
            if self.options.delay == 0:
                self._land()

    def _launch(self) -> None:
        self._left = [parameter.detach().clone() for parameter in self._parameters]
        with self._averager.get_tensors() as shared:
            for tensor, value in zip(shared, self._left, strict=True):
                tensor.copy_(value)
        self._average = self._averager.step(wait=False, timeout=self.patience.total_seconds())

    def _land(self) -> None:
        """Add how far the mean is from what has left.

        Raises:
            CommunicationError: Hivemind could not average.
        """
        found, failure = False, None
        try:
            found = self._average.result() is not None
        except Exception as error:  # raised below, when the other ranks know too
            failure = error
        own = torch.stack([value.double().sum() for value in self._left]).sum().view(1).cpu()
        everybody = own.new_empty(self.world_size)
        method_of(self._control, "all_gather_single")(everybody, own).wait()
        with self._averager.get_tensors() as shared, torch.no_grad():
            # Where a part fails, hivemind logs it and keeps a rank's own values.
            if not found or (everybody.unique().numel() > 1 and all(map(torch.equal, shared, self._left))):
                raise CommunicationError(
                    f"rank {self.rank}, update {self.steps + 1}: hivemind averaged nothing: its log says why"
                ) from failure
            for parameter, mean, left in zip(self._parameters, shared, self._left, strict=True):
                parameter.add_(mean - left)
        self._left = []

    def finish(self) -> list[Update]:
        """End the job; an average under way is dropped, but this rank serves the others until all have it."""
        if self._left:
            self._average.result()
        self._control.barrier().wait()
        self._averager.shutdown()
        self._dht.shutdown()
        return super().finish()


@contextlib.contextmanager
def _forked_processes() -> Iterator[None]:
    """Let processes that are started inside be forked: hivemind's hold what cannot be pickled."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def _own_address() -> str:
    """Return the address at which the other ranks reach this machine: that of its way to the store of the job."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return "127.0.0.1"  # a store in a file or in memory: all ranks are here
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((store.host, store.port))  # sends nothing
        address: str = way.getsockname()[0]
    return address


def _fragments(model: nn.Module, count: int) -> list[nn.Module]:
    """Return `count` parts of the trainable parameters, in the model's order, about equally large.

    Raises:
        ConfigError: A parameter is larger than a part.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total, behind = sum(parameter.numel() for parameter in parameters), 0
    parts: list[list[nn.Parameter]] = [[] for _ in range(count)]
    for parameter in parameters:
        parts[(2 * behind + parameter.numel()) * count // (2 * total)].append(parameter)  # by its middle
        behind += parameter.numel()
    if not all(parts):
        raise ConfigError(f"fragments={count}: a parameter is larger than a fragment; expected fewer of them")
    return [nn.ParameterList(part) for part in parts]
