"""The host reads from the `meta` device, each read is counted, and the program runs from end to end."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.step_budget.__main__ import main
from benchmarks.step_budget.host import fake_results
from benchmarks.step_budget.traffic import Meter


def test_reads_are_zeros_and_waits() -> None:
    numbers = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    with fake_results(), Meter(lambda _: "") as meter:
        assert numbers.tolist() == [[0, 0, 0], [0, 0, 0]]
        assert numbers[0, 1].item() == 0
        assert (numbers == 3).all()
        numbers.copy_(torch.ones(2, 3, dtype=torch.int64))
    traffic = meter.traffic
    assert (traffic.to_host, traffic.waits, traffic.to_device) == (3, 3, 1)
    assert (traffic.to_host_bytes, traffic.to_device_bytes) == (48 + 8 + 1, 48)
    assert traffic.kernels == 2  # the comparison and `all`


def test_reads_fail_without_them() -> None:
    with fake_results():
        pass
    with pytest.raises(NotImplementedError, match="meta"):
        torch.zeros(2, device="meta").tolist()


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "budget.json"
    small = ["--rows", "4", "--many", "8", "--context", "40", "--vocabulary", "100", "--steps", "4"]
    assert (
        main(["--shape", "tiny", "--drafter", "tiny", "--case", "sampled, drafts", *small, "--output", str(output)])
        == 0
    )
    assert "sampled, drafts" in capsys.readouterr().out
    names = [finding["name"] for finding in json.loads(output.read_text())["findings"]]
    assert names == ["sampled, drafts", "drafter's chain"]
