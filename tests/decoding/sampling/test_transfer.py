"""Copies to a device arrive as they were sent. The device is the CPU's memory here."""

import pytest
import torch

from decoding.sampling import transfer


def test_tensors_of_several_dtypes_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[torch.Tensor] = []

    def copy_to(device: str, tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor)
        return tensor

    monkeypatch.setattr(transfer, "copy_to", copy_to)
    sent = [
        torch.tensor([1, -2, 2**40]),
        torch.tensor([[0.5, -1.5], [2.5, 3.5], [4.5, 5.5]]).T,
        torch.empty(0),
        torch.tensor([True, False, True]),
        torch.arange(6, dtype=torch.int32).view(2, 3),
    ]
    received = transfer.copy_all("cuda", [tensor.numpy() for tensor in sent])
    assert len(copies) == 1
    for before, after in zip(sent, received, strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


def test_what_is_empty_needs_no_copy() -> None:
    empty = transfer.copy_to("meta", torch.empty(0, 3, dtype=torch.int32))
    assert (empty.device.type, empty.shape, empty.dtype) == ("meta", (0, 3), torch.int32)
