import subprocess
import sys
from pathlib import Path

from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_runner
from engine.model.ragged_batch import RowInput

ROOT = Path(__file__).parents[3]
TOKENS = [5, 6, 7, 8, 9]
PROGRAM = f"""
import sys
from engine.loading.lean_imports import lean_imports
with lean_imports():
    from engine.loading.checkpoint import ModelSpec
    from engine.loading.runners import load_runner
    from engine.model.ragged_batch import RowInput
    runner = load_runner(ModelSpec(name="m", path="models/target", slots=2, max_length=64))
logits = runner.logits([RowInput(slot=0, start=0, tokens={TOKENS}, wanted=1)])
unwanted = {{"torch._dynamo", "torch.distributed.tensor", "triton", "sympy"}} & set(sys.modules)
import torch
doubled = torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(1))
print(logits.sum(dtype=torch.float64).item().hex(), unwanted, doubled.item(), torch.distributed.is_available())
"""


def test_a_model_is_the_same_without_the_compiler_which_can_be_had_later() -> None:
    process = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    runner = load_runner(ModelSpec(name="m", path=str(ROOT / "models/target"), slots=2, max_length=64))
    logits = runner.logits([RowInput(slot=0, start=0, tokens=TOKENS, wanted=1)])
    assert process.stdout.split() == [float(logits.double().sum()).hex(), "set()", "2.0", "True"]
