"""A layer that sends messages of its own is refused where nobody keeps them in order with those of a job."""

import itertools

import pytest
from torch import nn

import stretto as st
from stretto.engine.messages import check_messages
from stretto.errors import UnsupportedModel
from stretto.groups import SoloGroup

SENDING = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.SyncBatchNorm(3)))
SILENT = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
STRATEGIES = (
    st.ZeRO1(),
    st.DDP(),
    st.LocalSGD(0.5),
    st.PAFTSync(),
    st.ACCO(),
    st.WeightPrediction(),
    st.DPU(),
)


class OfTwo(SoloGroup):
    """As far as it is asked, a group of two ranks, whose waits end it where they time out, as NCCL's do, or do not."""

    def __init__(self, may_wait_again: bool) -> None:
        super().__init__()
        self.may_wait_again = may_wait_again

    def size(self) -> int:
        return 2


def test_a_layer_that_sends_is_refused_beside_an_overlapping_lane_on_nccl_and_nowhere_else() -> None:
    for model, strategy, is_like_gloo in itertools.product((SENDING, SILENT), STRATEGIES, (True, False)):
        if model is SENDING and strategy.overlaps and not is_like_gloo:
            with pytest.raises(UnsupportedModel, match=r"no SyncBatchNorm under .* found '1\.0': over NCCL"):
                check_messages(model, strategy, OfTwo(is_like_gloo))
        else:
            check_messages(model, strategy, OfTwo(is_like_gloo))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_lone_rank_sends_nothing(strategy: st.Strategy) -> None:
    check_messages(SENDING, strategy, SoloGroup())
