"""`torch.autocast` around more than the forward pass changes nothing else: not the step, and not what is shown."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto.errors import UsageError
from tests.bits import unequal
from tests.loops.habits import batches, job, mean_square, network, ours, plain

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05),  # multiplies matrices
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
}


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output: Tensor = model(batch)
    return output.float().square().mean()


@pytest.mark.parametrize("strategy", [st.ZeRO1(), st.DPU(), st.DiLoCo(2)], ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_autocast_around_the_whole_loop_is_autocast_around_the_forward_pass(
    name: str, strategy: st.Strategy
) -> None:
    choices = {"strategy": strategy, "make_optimizer": OPTIMIZERS[name]}
    inside = ours(network(), loss_of, **choices)
    with torch.autocast("cpu", torch.bfloat16):
        around = ours(network(), loss_of, **choices)
    assert unequal(inside.parameters(), around.parameters()) == []
    if strategy.name == "zero1":
        plainly = plain(network(), loss_of, optimizer=OPTIMIZERS[name])
        assert unequal(inside.parameters(), plainly.parameters()) == []


def test_micro_batches_that_are_replayed_under_autocast_see_the_mended_values() -> None:
    def trained(*, is_struck: bool) -> tuple[nn.Module, list[str]]:
        model = network()
        actions: list[str] = []
        with job(model, micro_batches=1, guards=[st.AtRest()]) as parallel:
            for index, batch in enumerate(batches(3)):
                if is_struck and index == 1:
                    model[0].weight.detach().numpy()[0, 3] = 1e4
                with torch.autocast("cpu", torch.bfloat16):
                    update = parallel.micro_batch(lambda one: mean_square(model, one).float(), batch)
                assert update is not None
                actions += [incident.action for incident in update.incidents]
            parallel.finish()
        return model, actions

    (sound, nothing), (struck, actions) = trained(is_struck=False), trained(is_struck=True)
    assert nothing == []
    assert len(actions) == 1
    assert actions[0].startswith("mended")
    assert unequal(sound.parameters(), struck.parameters()) == []


@pytest.mark.parametrize("strategy", [st.ZeRO1(), st.ACCO()], ids=str)
def test_autocast_to_float16_is_refused_at_the_first_forward_pass(strategy: st.Strategy) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        st.DataParallel(model, optimizer, strategy, micro_batches=2),
        pytest.raises(UsageError, match="expected autocast to bfloat16"),
        torch.autocast("cpu", torch.float16),
    ):
        model(torch.ones(3, 4))
