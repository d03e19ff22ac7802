"""Noise on purpose hits our own strategies alone."""

import pytest

from stretto.errors import ConfigError
from stretto.noise import Noise
from stretto_lab.recipes import DigitsResNet
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.handle import check_run


def test_stock_methods_cannot_be_hit() -> None:
    run = RunConfig(task=DigitsResNet(), strategy="torch-local-sgd", noise=Noise(1e-4))
    with pytest.raises(ConfigError, match="torch-local-sgd: noise hits our own strategies only"):
        check_run(run, 2)
