"""What cannot be trained is refused when it is wrapped, with one clear error and nothing left behind."""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stretto as st
from stretto.errors import ConfigError, UnknownName, UnsupportedModel, UnsupportedOptimizer
from stretto.strategies import strategy_by_name
from tests.errors.tiny import STRATEGIES, says, tiny_model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer over whatever parameters, some of which it would refuse by itself: they are not its affair here."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return optimizer


def wrap(
    strategy: Any = None,
    micro_batches: Any = 1,
    *,
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], Any] = sgd,
    **settings: Any,
) -> st.DataParallel:
    model = tiny_model() if model is None else model
    return st.DataParallel(model, optimizer(model), strategy, micro_batches=micro_batches, **settings)


def holding(value: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(value)
    return model


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


Row = tuple[Callable[[], Any], type[Exception], tuple[str, ...]]
MODELS: list[Row] = [
    (
        lambda: wrap(model=tiny_model().requires_grad_(False)),
        UnsupportedModel,
        ("no trainable parameter", "expected at least one requires_grad=True"),
    ),
    *(
        (
            lambda dtype=dtype: wrap(model=holding(torch.ones(2).to(dtype))),
            UnsupportedModel,
            ("'odd'", str(dtype), "expected", "torch.float32", remedy),
        )
        for dtype, remedy in (
            (torch.complex64, "pairs of real"),
            (torch.float16, "use bfloat16"),
            (torch.float8_e4m3fn, "requires_grad_(False)"),
        )
    ),
    (
        lambda: wrap(model=nn.Linear(2, 2, device="meta")),
        UnsupportedModel,
        ("'weight'", "no values", "meta device"),
    ),
    (lambda: wrap(model=nn.LazyLinear(2)), UnsupportedModel, ("'weight'", "run a forward pass")),
    (
        lambda: st.DataParallel(tiny_model().forward, sgd(tiny_model())),
        UnsupportedModel,
        ("expected an nn.Module", "method"),
    ),
]
OPTIMIZERS: list[Row] = [
    *(
        (
            lambda make=make, strategy=strategy: wrap(STRATEGIES[strategy], optimizer=make),
            UnsupportedOptimizer,
            (name, "expected", "AdamW"),
        )
        for (name, make), strategy in itertools.product(
            {
                "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
                "SparseAdam": lambda model: torch.optim.SparseAdam(list(model.parameters())),
            }.items(),
            ("ddp", "zero1"),
        )
    ),
    (
        lambda: wrap(optimizer=lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1)),
        UnsupportedOptimizer,
        ("2 trainable parameters are in no group", "'2.weight'", "add them or freeze them"),
    ),
    (
        lambda: wrap(
            optimizer=lambda model: torch.optim.SGD(
                [*model.parameters(), *nn.Linear(2, 2).parameters()], lr=0.1
            )
        ),
        UnsupportedOptimizer,
        ("2 parameters that the model does not have", "build it from model.parameters()"),
    ),
    (lambda: wrap(optimizer=stepped), UnsupportedOptimizer, ("has not stepped yet", "checkpoint")),
    (
        lambda: wrap(optimizer=lambda model: torch.optim.lr_scheduler.ConstantLR(sgd(model))),
        UnsupportedOptimizer,
        ("expected a torch.optim.Optimizer", "ConstantLR"),
    ),
    (
        lambda: wrap(scheduler=sgd(tiny_model())),
        ConfigError,
        ("scheduler: expected one of torch.optim.lr_scheduler", "SGD"),
    ),
]
STRATEGIES_AND_COUNTS: list[Row] = [
    (lambda strategy=strategy, count=count: wrap(strategy, count), ConfigError, words)
    for strategy, count, words in (
        (st.ZeRO1(), 0, ("micro_batches=0", "at least 1")),
        (st.ZeRO1(), -3, ("micro_batches=-3", "at least 1")),
        (st.ZeRO1(), 2.5, ("micro_batches=2.5", "expected an integer")),
        (None, True, ("micro_batches=True", "expected an integer")),
        (st.ACCO(), 1, ("acco needs at least 2 micro-batches", "got 1", "raise micro_batches")),
        (st.ACCO(first=0), 4, ("ACCO(first=0) with 4", "at least 1")),
        (st.ACCO(first=4), 4, ("ACCO(first=4) with 4", "at least one for the second half")),
        (st.ACCO, 4, ("strategy", "an instance such as ACCO()")),
        ("acco", 4, ("strategy", "an instance such as ACCO()", "'acco'")),
        (st.ACCO(first=1), st.Clock(), ("ACCO(first=1)", "Clock", "remove one")),
    )
]
COUNTS: list[Row] = [
    (lambda ask=ask, wrong=wrong: ask(wrong), ConfigError, (words,))
    for wrong in (True, -1, 2.5, "3", float("nan"))
    for ask, words in (
        (lambda wrong: wrap(micro_batches=wrong), "micro_batches"),
        (
            lambda wrong: next(iter(wrap().feed([torch.ones(1, 4)], updates=wrong))),
            "expected a number of updates",
        ),
    )
]
NEEDS_EQUAL_PARAMETERS = "audit runs a rank's micro-batches again on another"
SETTINGS: list[Row] = [
    (lambda settings=settings: wrap(**settings), ConfigError, words)
    for settings, words in (
        *(
            ({"options": options}, ("options: expected Options(...)", repr(options)))
            for options in ({"clip_norm": 1.0}, "int4", st.Options)
        ),
        ({"guards": "standart"}, ("'standart'", "did you mean 'standard'?")),
        ({"guards": st.AtRest()}, ("expected 'standard' or a sequence of guards", "AtRest()")),
        ({"guards": [st.AtRest]}, ("expected 'standard' or instances", "did you mean AtRest()?")),
        ({"clip_norm": 1.0}, ("write options=stretto.Options(clip_norm=1.0)",)),
        *(
            (
                {"strategy": strategy, "options": st.Options(changes="int2")},
                ("Options(changes='int2')", f"strategy {strategy.name} sends no changes", *more),
            )
            for strategy, more in ((st.DDP(), ("leave it out", "zero1")), (st.LocalSGD(), ()))
        ),
        *(
            (
                {"strategy": strategy, "micro_batches": 2, "wire": "int2"},
                (
                    f"Options(wire='int2'): strategy {strategy.name} sends gradients",
                    "expected 'rotated2'",
                    "average",
                ),
            )
            for strategy in (st.ACCO(), st.PAFTSync(4))
        ),
        *(
            ({"strategy": strategy, "guards": (st.Audit(),)}, (NEEDS_EQUAL_PARAMETERS,))
            for strategy in (
                st.LocalSGD(),
                st.LocalSGD(rate=0.5, state=True),
                *(kind(overlap=overlap) for kind in (st.PAFTSync, st.PAFTDyn) for overlap in (False, True)),
            )
        ),
    )
]
PARTS: list[Row] = [
    (lambda kind=kind, options=options: kind(**options), ConfigError, words)
    for kind, options, *words in (
        *(
            (
                st.Clock, {"minimum": minimum, "maximum": maximum},
                f"minimum={minimum}, maximum={maximum}", "expected 1 <= minimum <= maximum",
            )
            for minimum, maximum in ((3, 2), (0, 4), (-1, -1))
        ),
        *(
            (st.Options, {field: value}, f"Options({field}={value!r})", f"expected {expected}")
            for field, value, expected in (
                ("wire", "fp8", "one of fp32, bf16, int8"),
                ("nonfinite", "ignore", "one of raise, skip"),
                ("accumulate", "fp64", "one of fp32, parameter"),
                ("clip_norm", 0.0, "a positive norm, or None"),
                ("clip_norm", float("nan"), "a positive norm, or None"),
                ("bucket_bytes", 0, "a positive number of bytes"),
                ("timeout_seconds", 0.0, "a positive, finite number of seconds"),
                ("timeout_seconds", float("inf"), "a positive, finite number of seconds"),
                ("ranks_per_node", 0, "at least 1"),
            )
        ),
        (st.Audit, {"rate": 0.0}, "Audit"),
        (st.Audit, {"rate": 1.5}, "Audit"),
        (st.LocalSGD, {"rate": 1.5}, "rate=1.5): expected averages per update, from 0 to 1"),
        (st.LocalSGD, {"rate": 0}, "set max_gap, or a rate above 0"),
        (st.LocalSGD, {"max_gap": 0}, "max_gap=0): expected at least 1 update"),
        (st.LocalSGD, {"plan": "odd"}, "expected one of even, bernoulli"),
        (st.DiLoCo, {"interval": 0}, "expected at least 1 update"),
        (st.DiLoCo, {"interval": 3, "fragments": 4}, "at most one per update of the interval"),
        (
            st.DiLoCo, {"interval": 10, "fragments": 4, "delay": 2},
            "expected from 0 to 1, because a fragment must arrive before",
        ),
        (st.DiLoCo, {"outer_lr": 0.0}, "expected a positive, finite number"),
        (st.DiLoCo, {"outer_momentum": 1.0}, "expected from 0 to below 1"),
        (st.DiLoCo, {"mix": 1.0, "delay": 1}, "expected from 0 to below 1"),
        (st.DiLoCo, {"keep_progress": True}, "no step falls between"),
        (strategy_by_name, {"name": "hogwild"}, "'hogwild'", *STRATEGIES),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "kind", "words"),
    [*MODELS, *OPTIMIZERS, *STRATEGIES_AND_COUNTS, *COUNTS, *SETTINGS, *PARTS],
    ids=lambda value: value[0][:50] if isinstance(value, tuple | list) else "",
)
def test_what_cannot_be_is_refused_with_its_name(
    build: Callable[[], Any], kind: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        build()
    assert isinstance(caught.value, UnknownName) == (words[0] == "'hogwild'")
    assert says(caught.value, *words)


def test_an_argument_that_does_not_exist_is_pythons_affair() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'clipnorm'"):
        wrap(clipnorm=1.0)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A default process group with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_sharded_or_already_wrapped_model_is_refused(group_of_one: None) -> None:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (1,))))
    with pytest.raises(UnsupportedModel) as caught:
        wrap(model=model)
    assert says(caught.value, "'weight'", "DTensor", "mesh=mesh['node']")
    with pytest.raises(UnsupportedModel) as caught:
        wrap(model=nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    assert says(caught.value, "DistributedDataParallel", ".module")


def test_a_frozen_integer_parameter_is_carried_along() -> None:
    model = nn.Linear(2, 2)
    # That a trainable one cannot exist is PyTorch's own rule.
    model.steps = nn.Parameter(torch.tensor([3, 4]), requires_grad=False)
    parallel = st.DataParallel(
        model, torch.optim.SGD(model.parameters(), lr=0.1), st.ZeRO1(), micro_batches=1
    )
    assert parallel.backward(model(torch.ones(1, 2)).sum()) is not None
    assert model.steps.tolist() == [3, 4]


class Steps(torch.optim.Optimizer):
    """Descends in steps of one length, which is called otherwise than a learning rate."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, {"length": 0.1, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["length"])


@pytest.mark.parametrize("settings", [{}, {"lr": None}], ids=str)
@pytest.mark.parametrize("strategy", [*STRATEGIES.values(), st.LocalSGD(), st.PAFTDyn(first=1)])
def test_an_optimizer_without_a_learning_rate_trains_and_reports_none(
    strategy: st.Strategy, settings: dict[str, Any]
) -> None:
    model = tiny_model()
    updates: list[st.Update] = []
    with st.DataParallel(model, Steps(model.parameters(), **settings), strategy, micro_batches=2) as parallel:
        for inputs in parallel.feed([torch.ones(1, 4)] * 12, on_update=updates.append):
            parallel.backward(model(inputs).sum())
        parallel.finish()
    assert len(updates) >= 3
    assert [
        (update, rate) for update in updates for rate in update.learning_rates if not math.isnan(rate)
    ] == []
    assert json.loads(json.dumps(updates[0].as_json(), allow_nan=False))["learning_rates"] == [None]


def test_a_refusal_leaves_model_and_optimizer_as_they_were() -> None:
    model = tiny_model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError):
        st.DataParallel(model, optimizer, st.ACCO(), micro_batches=1)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert [parameter for parameter in model.parameters() if parameter.grad.dtype != torch.bfloat16] == []
    optimizer.step()
