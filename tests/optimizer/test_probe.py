"""Which optimizers may be sharded is found out by trying."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from stretto import DDP, DataParallel
from stretto.errors import UnsupportedOptimizer
from stretto.optimizer import whole_groups
from stretto.optimizer.probe import _Described, _reason, _reason_once
from stretto.optimizer.trial import Trial
from tests.optimizer.written import (
    ELEMENT_WISE,
    REFUSED,
    WHOLE,
    Around,
    ClipsByNorm,
    RatePerParameter,
    SignSGD,
    Written,
)


class Positional(optim.SGD):
    """Its constructor does not take what its groups hold."""

    def __init__(self, params: object, strength: float) -> None:
        super().__init__(params, lr=strength)


class FirstParameter(Written):
    """Looks at the first parameter of every group, which a rank may not have."""

    def step(self, closure: object = None) -> None:
        self.device = str(self.param_groups[-1]["params"][0].device)
        super().step()


def matrix() -> list[Tensor]:
    return [nn.Parameter(torch.ones(4, 3))]


def two_groups() -> list[dict]:
    return [{"params": matrix()}, {"params": [nn.Parameter(torch.ones(7))]}]


@pytest.mark.parametrize("name", ELEMENT_WISE)
@pytest.mark.parametrize("lr", [0.0, 0.01])
def test_element_wise_optimizer_may_be_cut(name: str, lr: float) -> None:
    optimizer = ELEMENT_WISE[name](two_groups())
    for group in optimizer.param_groups:
        group["lr"] = lr
    assert whole_groups(optimizer) == set()


@pytest.mark.parametrize("name", WHOLE)
def test_tensors_of_any_other_optimizer_stay_whole(name: str) -> None:
    assert whole_groups(WHOLE[name](two_groups())) == {0, 1}


def test_a_subclass_of_an_element_wise_optimizer_is_any_other() -> None:
    class Own(optim.AdamW):
        pass

    class Declared(Own):
        element_wise = True

    class Inherits(Declared):
        pass

    assert whole_groups(Own(two_groups())) == whole_groups(Inherits(two_groups())) == {0, 1}
    assert whole_groups(Declared(two_groups())) == set()


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}, {"lr": torch.tensor(0.1)}], ids=str)
def test_implementation_of_adamw_does_not_matter(settings: dict) -> None:
    assert whole_groups(optim.AdamW(matrix(), **settings)) == set()


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_optimizer_is_refused_by_name_with_its_reason(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(UnsupportedOptimizer, match=f"^{name} .*{reason}"):
        whole_groups(make(two_groups()))


def test_every_optimizer_of_torch_is_either_accepted_or_refused_here() -> None:
    kinds = {name for name in optim.__all__ if isinstance(getattr(optim, name), type)} - {"Optimizer"}
    assert kinds - {*ELEMENT_WISE, *WHOLE, *REFUSED} == {"Muon"}


@pytest.mark.parametrize("bound", [1e-3, 1.0, 1e3])
def test_clip_inside_a_step_shows_whatever_its_bound(bound: float) -> None:
    with pytest.raises(UnsupportedOptimizer, match="depends on other parameters"):
        whole_groups(ClipsByNorm(matrix(), bound=bound))


def test_attribute_of_a_parameter_shows_if_the_optimizer_reads_it() -> None:
    parameters = [nn.Parameter(torch.ones(4, 3)) for _ in range(3)]
    whole_groups(RatePerParameter(parameters))
    parameters[1].rate = 0.5
    whole_groups(SignSGD(parameters))
    with pytest.raises(UnsupportedOptimizer, match="attribute of the parameter"):
        whole_groups(RatePerParameter(parameters))


def test_rank_that_owns_nothing_is_tried_too() -> None:
    with pytest.raises(UnsupportedOptimizer, match=r"FirstParameter cannot step .* alone \(IndexError"):
        whole_groups(FirstParameter(matrix()))


class LastScaled(optim.SGD):
    """Keeps a tensor of its own, which depends on an argument that is no default."""

    def __init__(self, params: Any, lr: float = 0.1, *, last: float = 1.0) -> None:
        super().__init__(params, lr)
        self.scales = torch.tensor([1.0, 1.0, last])


def test_tensor_that_the_constructor_makes_by_itself_is_refused_if_any_element_depends_on_an_argument() -> (
    None
):
    whole_groups(LastScaled(matrix()))
    with pytest.raises(UnsupportedOptimizer, match="attribute 'scales'"):
        whole_groups(LastScaled(matrix(), last=2.0))


def test_a_verdict_that_is_remembered_is_that_of_a_fresh_trial() -> None:
    draw = random.Random(0)
    fresh: dict[tuple, str | None] = {}
    for _ in range(100):
        kind, bound = draw.choice([(SignSGD, None), (ClipsByNorm, 100.0), (ClipsByNorm, 1e30)])
        shape = draw.choice([(4,), (4, 3), (65, 128)])
        trial = Trial(kind([nn.Parameter(torch.ones(shape))], lr=0.1, **({"bound": bound} if bound else {})))
        assert trial.description is not None
        if (kind, bound, shape) not in fresh:
            fresh[kind, bound, shape] = _reason(trial)
        assert _reason_once(_Described(trial)) == fresh[kind, bound, shape]
    assert {reason is None for reason in fresh.values()} == {True, False}


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_that_would_never_be_called_are_refused(register: str) -> None:
    optimizer = optim.SGD(matrix())
    handle = getattr(optimizer, register)(lambda *_: None)
    with pytest.raises(UnsupportedOptimizer, match="SGD has step hooks"):
        whole_groups(optimizer)
    handle.remove()
    whole_groups(optimizer)


def test_step_that_was_replaced_is_refused_unless_a_scheduler_did_it() -> None:
    optimizer = optim.SGD(matrix())
    optim.lr_scheduler.LinearLR(optimizer)
    whole_groups(optimizer)
    optimizer.step = lambda: None
    with pytest.raises(UnsupportedOptimizer, match=r"SGD.step was replaced"):
        whole_groups(optimizer)


def test_random_state_is_left_as_it_is() -> None:
    state = torch.get_rng_state()
    with pytest.raises(UnsupportedOptimizer, match="random numbers"):
        whole_groups(REFUSED["Noisy"][0](two_groups()))
    assert torch.equal(torch.get_rng_state(), state)


class Scaled:
    """Holds an optimizer without being one, as wrappers for mixed precision do."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer


@pytest.mark.parametrize(("wrapper", "attribute"), [(Around, "optimizer"), (Scaled, "_optimizer")])
def test_wrapped_optimizer_is_refused_with_the_attribute_that_holds_it(wrapper: type, attribute: str) -> None:
    model = nn.Linear(3, 3)
    wrapped = wrapper(optim.AdamW(model.parameters()))
    with pytest.raises(UnsupportedOptimizer, match=f"found a {wrapper.__name__} .* pass its .{attribute},"):
        DataParallel(model, wrapped, DDP())
    with DataParallel(model, getattr(wrapped, attribute), DDP()):
        pass


def test_class_that_cannot_be_built_again_is_refused() -> None:
    with pytest.raises(UnsupportedOptimizer, match="Positional cannot be built over other tensors"):
        whole_groups(Positional(matrix(), 0.1))


def test_probe_does_not_touch_the_users_optimizer() -> None:
    parameters = matrix()
    optimizer = optim.AdamW(parameters, lr=0.5)
    before = copy.deepcopy(optimizer.state_dict())
    whole_groups(optimizer)
    assert torch.equal(parameters[0], torch.ones(4, 3))
    assert optimizer.state_dict() == before


def test_refusal_comes_with_wrapping() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(UnsupportedOptimizer, match="ClipsByNorm"):
        DataParallel(model, ClipsByNorm(model.parameters()), DDP())
