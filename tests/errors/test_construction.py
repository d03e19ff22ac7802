"""What cannot be trained is refused when it is wrapped, with one clear error and nothing left behind."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stretto as st
from stretto.errors import ConfigError, StrettoError, UnknownName, UnsupportedModel, UnsupportedOptimizer
from stretto.strategies import strategy_by_name
from stretto_lab.peers import PEERS, make_peer
from tests.errors.tiny import STRATEGIES, says, tiny_model


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A default process group with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refused(model: nn.Module, kind: type[StrettoError]) -> StrettoError:
    """The error that wrapping `model` with an ordinary optimizer raises."""
    # An optimizer refuses some models by itself; its parameters are not what is tested here.
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with pytest.raises(kind) as caught:
        st.DataParallel(model, optimizer)
    return caught.value


def holding(value: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(value)
    return model


def test_a_model_without_trainable_parameters_is_refused() -> None:
    error = refused(tiny_model().requires_grad_(False), UnsupportedModel)
    assert says(error, "no trainable parameter", "expected at least one requires_grad=True")


@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, "int4", st.Options])
def test_options_of_another_kind_are_refused(options: Any) -> None:
    model = tiny_model()
    with pytest.raises(ConfigError) as caught:
        st.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), options=options)
    assert says(caught.value, "options: expected Options(...)", repr(options))


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        (torch.complex64, "pairs of real"),
        (torch.float16, "use bfloat16"),
        (torch.float8_e4m3fn, "requires_grad_(False)"),
    ],
    ids=str,
)
def test_a_trainable_parameter_of_a_dtype_that_cannot_be_averaged_is_named(
    dtype: torch.dtype, remedy: str
) -> None:
    error = refused(holding(torch.ones(2).to(dtype)), UnsupportedModel)
    assert says(error, "'odd'", str(dtype), "expected", "torch.float32", remedy)


def test_a_frozen_integer_parameter_is_carried_along() -> None:
    model = nn.Linear(2, 2)
    # That a trainable one cannot exist is PyTorch's own rule.
    model.steps = nn.Parameter(torch.tensor([3, 4]), requires_grad=False)
    parallel = st.DataParallel(
        model, torch.optim.SGD(model.parameters(), lr=0.1), st.ZeRO1(), micro_batches=1
    )
    assert parallel.backward(model(torch.ones(1, 2)).sum()) is not None
    assert model.steps.tolist() == [3, 4]


def test_a_parameter_without_values_is_named() -> None:
    assert says(
        refused(nn.Linear(2, 2, device="meta"), UnsupportedModel), "'weight'", "no values", "meta device"
    )
    assert says(refused(nn.LazyLinear(2), UnsupportedModel), "'weight'", "run a forward pass")


def test_a_sharded_or_already_wrapped_model_is_refused(group_of_one: None) -> None:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh))
    assert says(refused(model, UnsupportedModel), "'weight'", "DTensor", "mesh=mesh['node']")
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    assert says(refused(wrapped, UnsupportedModel), "DistributedDataParallel", ".module")


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
    "SparseAdam": lambda model: torch.optim.SparseAdam(list(model.parameters())),
}


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_needs_more_than_a_dense_gradient_is_refused_replicated_or_not(
    name: str, strategy: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    with pytest.raises(UnsupportedOptimizer) as caught:
        st.DataParallel(model, OPTIMIZERS[name](model), STRATEGIES[strategy])
    assert says(caught.value, name, "expected", "AdamW")


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adafactor", "RMSprop", "Rprop"]
)
def test_an_optimizer_that_treats_each_parameter_by_itself_is_accepted(name: str) -> None:
    model = tiny_model()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    parallel = st.DataParallel(model, optimizer, st.ZeRO1(), micro_batches=1)
    assert parallel.backward(model(torch.ones(1, 4)).sum()) is not None


class Steps(torch.optim.Optimizer):
    """Descends in steps of one length, which is called otherwise than a learning rate."""

    def __init__(self, parameters: Any, length: float = 0.1) -> None:
        super().__init__(parameters, {"length": length})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["length"])


@pytest.mark.parametrize("strategy", [*STRATEGIES.values(), st.LocalSGD(), st.PAFTDyn(first=1)])
def test_an_optimizer_without_a_learning_rate_trains_and_reports_none(strategy: st.Strategy) -> None:
    model = tiny_model()
    updates: list[st.Update] = []
    with st.DataParallel(model, Steps(model.parameters()), strategy, micro_batches=2) as parallel:
        for inputs in parallel.feed([torch.ones(1, 4)] * 12, on_update=updates.append):
            parallel.backward(model(inputs).sum())
        parallel.finish()
    assert len(updates) >= 3
    assert all(math.isnan(rate) for update in updates for rate in update.learning_rates)
    assert json.loads(json.dumps(updates[0].as_json(), allow_nan=False))["learning_rates"] == [None]


def test_an_optimizer_over_other_parameters_than_the_models_is_refused() -> None:
    model = tiny_model()
    some = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(UnsupportedOptimizer) as caught:
        st.DataParallel(model, some)
    assert says(
        caught.value, "2 trainable parameters are in no group", "'2.weight'", "add them or freeze them"
    )
    more = torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).parameters()], lr=0.1)
    with pytest.raises(UnsupportedOptimizer) as caught:
        st.DataParallel(model, more)
    assert says(caught.value, "2 parameters that the model does not have", "build it from model.parameters()")


def test_an_optimizer_that_has_stepped_is_refused_since_its_state_would_be_lost() -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(UnsupportedOptimizer) as caught:
        st.DataParallel(model, optimizer)
    assert says(caught.value, "has not stepped yet", "checkpoint")


@pytest.mark.parametrize(
    ("strategy", "micro_batches", "parts"),
    [
        (st.ZeRO1(), 0, ("micro_batches=0", "at least 1")),
        (st.ZeRO1(), -3, ("micro_batches=-3", "at least 1")),
        (st.ZeRO1(), 2.5, ("micro_batches=2.5", "expected an integer")),
        (st.ACCO(), 1, ("acco needs at least 2 micro-batches", "got 1", "raise micro_batches")),
        (st.ACCO(first=0), 4, ("ACCO(first=0) with 4", "at least 1")),
        (st.ACCO(first=4), 4, ("ACCO(first=4) with 4", "at least one for the second half")),
        (st.ACCO, 4, ("strategy", "an instance such as ACCO()")),
        ("acco", 4, ("strategy", "an instance such as ACCO()", "'acco'")),
        (st.ACCO(first=1), st.Clock(), ("ACCO(first=1)", "Clock", "leave out one")),
    ],
)
def test_impossible_counts_and_strategies_are_refused(
    strategy: st.Strategy, micro_batches: int | st.Clock, parts: tuple[str, ...]
) -> None:
    model = tiny_model()
    with pytest.raises(ConfigError) as caught:
        st.DataParallel(
            model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, micro_batches=micro_batches
        )
    assert says(caught.value, *parts)


@pytest.mark.parametrize(("minimum", "maximum"), [(3, 2), (0, 4), (-1, -1)])
def test_a_clock_that_cannot_be_kept_is_refused(minimum: int, maximum: int) -> None:
    with pytest.raises(ConfigError) as caught:
        st.Clock(minimum=minimum, maximum=maximum)
    assert says(caught.value, f"minimum={minimum}, maximum={maximum}", "expected 1 <= minimum <= maximum")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("wire", "fp8", "one of fp32, bf16, int8"),
        ("exchange", "ring", "one of auto, native, direct"),
        ("nonfinite", "ignore", "one of raise, skip"),
        ("accumulate", "fp64", "one of fp32, parameter"),
        ("clip_norm", 0.0, "a positive norm, or None"),
        ("clip_norm", float("nan"), "a positive norm, or None"),
        ("bucket_bytes", 0, "a positive number of bytes"),
        ("timeout_seconds", 0.0, "a positive, finite number of seconds"),
        ("timeout_seconds", float("inf"), "a positive, finite number of seconds"),
    ],
)
def test_an_option_out_of_range_is_refused(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        st.Options(**{field: value})
    assert says(caught.value, f"Options({field}={value!r})", f"expected {expected}")


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_a_packed_wire_is_refused_where_nobody_unpacks_it(wire: str) -> None:
    with pytest.raises(ConfigError) as caught:
        st.Options(wire=wire, exchange="native")
    assert says(caught.value, f"wire={wire!r}", "expected exchange='direct' or 'auto'")


@pytest.mark.parametrize(
    ("strategy", "field", "parts"),
    [
        (st.DDP(), "changes", ("strategy ddp sends no changes", "leave it out", "zero1")),
        (st.LocalSGD(), "changes", ("strategy local sends no changes",)),
    ],
    ids=str,
)
def test_a_format_of_what_is_not_sent_is_refused(strategy: Any, field: str, parts: tuple[str, ...]) -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = st.Options(**{field: "int2"})
    with pytest.raises(ConfigError) as caught:
        st.DataParallel(model, optimizer, strategy, micro_batches=2, options=options)
    assert says(caught.value, f"Options({field}='int2')", *parts)


def test_an_unknown_strategy_is_answered_with_those_that_exist() -> None:
    with pytest.raises(UnknownName) as caught:
        strategy_by_name("hogwild")
    assert says(caught.value, "'hogwild'", *STRATEGIES)


def test_things_of_another_kind_are_refused() -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedModel) as caught:
        st.DataParallel(model.forward, optimizer)
    assert says(caught.value, "expected an nn.Module", "method")
    with pytest.raises(UnsupportedOptimizer) as caught:
        st.DataParallel(model, torch.optim.lr_scheduler.ConstantLR(optimizer))
    assert says(caught.value, "expected a torch.optim.Optimizer", "ConstantLR")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"guards": "standart"}, ("'standart'", "did you mean 'standard'?")),
        ({"guards": st.AtRest()}, ("expected 'standard' or a sequence of guards", "AtRest()")),
        ({"guards": [st.AtRest]}, ("expected 'standard' or instances", "did you mean AtRest()?")),
        ({"micro_batches": True}, ("micro_batches=True", "expected an integer")),
    ],
)
def test_an_argument_of_another_kind_is_refused_with_what_was_meant(
    wrong: dict[str, Any], words: tuple[str, ...]
) -> None:
    model = tiny_model()
    with pytest.raises(ConfigError) as caught:
        st.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), **wrong)
    assert says(caught.value, *words)


@pytest.mark.parametrize("wrong", [True, -1, 2.5, "3", float("nan")])
def test_what_is_no_count_is_refused_wherever_one_is_asked_for(wrong: Any) -> None:
    model = tiny_model()

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(ConfigError, match="micro_batches"):
        st.DataParallel(model, optimizer(), micro_batches=wrong)
    with pytest.raises(ConfigError, match="fixed number of micro-batches"):
        make_peer(next(iter(PEERS)), model, optimizer(), wrong)
    with pytest.raises(ConfigError, match="expected a number of updates"):
        next(iter(st.DataParallel(model, optimizer()).feed([torch.ones(1, 4)], updates=wrong)))


def test_an_optimizer_is_no_scheduler() -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError) as caught:
        st.DataParallel(model, optimizer, scheduler=optimizer)
    assert says(caught.value, "scheduler: expected one of torch.optim.lr_scheduler", "SGD")


def test_a_refusal_leaves_model_and_optimizer_as_they_were() -> None:
    model = tiny_model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError):
        st.DataParallel(model, optimizer, st.ACCO(), micro_batches=1)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())
    optimizer.step()


def test_an_option_that_is_given_to_the_job_itself_is_told_where_it_belongs() -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"write options=stretto.Options\(clip_norm=1.0\)"):
        st.DataParallel(model, optimizer, clip_norm=1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'clipnorm'"):
        st.DataParallel(model, optimizer, clipnorm=1.0)
