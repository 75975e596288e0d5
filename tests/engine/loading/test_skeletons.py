import pytest
import torch
from torch import nn

from engine.loading.skeletons import QuickSkeletons


def test_positions_may_meet_what_is_on_the_meta_device() -> None:
    with QuickSkeletons(), torch.device("meta"):
        positions = torch.arange(0, 4)
        mixed = torch.tensor([1.0, 2.0, 3.0, 4.0]) * 10000.0 ** (positions / 4)
        layer = nn.Embedding(3, 4)
    assert positions.tolist() == [0, 1, 2, 3]
    assert (mixed.is_meta, mixed.shape, layer.weight.is_meta) == (True, (4,), True)


def test_weights_elsewhere_are_filled_and_errors_stay() -> None:
    with QuickSkeletons():
        assert nn.init.constant_(torch.zeros(2), 3.0).tolist() == [3.0, 3.0]
        assert nn.init.normal_(torch.zeros(2)).all()
        with pytest.raises(RuntimeError, match="size"):
            torch.ones(2) + torch.ones(3)
