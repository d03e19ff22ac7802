"""What people save in their loops holds the whole state, or is refused."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from stretto.errors import CheckpointError, UsageError
from tests.loops.habits import batches, job, mean_square, network, same


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_state_is_saved_in_the_background_while_training_goes_on() -> None:
    model, loaded = network(), network()
    parallel = job(model, micro_batches=1)
    parallel.backward(mean_square(model, batches()[0]))
    before = copy.deepcopy(model)
    saving = dcp.async_save(parallel.state_dict(), checkpoint_id="saved")
    parallel.backward(mean_square(model, batches()[1]))
    saving.result()
    fresh = job(loaded, micro_batches=1)
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id="saved")
    fresh.load_state_dict(state)
    assert same(loaded, before)
    fresh.backward(mean_square(loaded, batches()[1]))  # the momentum was saved too
    assert same(loaded, model)


def test_a_copied_state_stays_as_it_was() -> None:
    model = network()
    parallel = job(model, micro_batches=1)
    kept = copy.deepcopy(parallel.state_dict())
    parallel.backward(mean_square(model, batches()[0]))
    parallel.load_state_dict(kept)
    assert same(model, network())


@pytest.mark.parametrize("write", [pickle.dumps, lambda state: torch.save(state, io.BytesIO())])
def test_the_share_of_one_rank_is_not_pickled(write: object) -> None:
    with pytest.raises(CheckpointError, match=r"torch\.distributed\.checkpoint\.save.*its own share"):
        write(job(network()).state_dict())


def test_the_empty_state_of_the_users_optimizer_is_not_given_out() -> None:
    for ask in (lambda optimizer: optimizer.state_dict(), lambda optimizer: optimizer.load_state_dict({})):
        parallel = job(network())
        with pytest.raises(
            UsageError, match=r"rank 0, after step 0: .*private optimizer.*parallel\.state_dict\(\)"
        ):
            ask(parallel.optimizer)
        parallel.finish()
    parallel.optimizer.state_dict()  # the user's own again
