"""Plans for machines that are only described: 0, 1, 2 and 8 GPUs, few and many cores, little memory."""

from dataclasses import replace

import pytest

from decoding.errors import ConfigError
from deployments.planning.devices import Demand, Gpu, Machine
from deployments.planning.model_size import ModelSize
from deployments.planning.plan import GIB, Assignment, Plan, make_plan

SMALL = ModelSize(weights_bytes=1 * GIB, kv_bytes=2**15, positions=8192)
LARGE = ModelSize(weights_bytes=16 * GIB, kv_bytes=2**17, positions=32768)
TARGET = Demand(name="target", size=LARGE)
DRAFTER = Demand(name="drafter", size=SMALL, drafts_for="target", may_colocate=True)
SEPARATE = replace(DRAFTER, may_colocate=False)  # as a file says
MEMBER = Demand(name="member", size=LARGE)


def machine(gpus: int = 0, *, gib: float = 80, cores: int = 16, memory_gib: float = 200) -> Machine:
    free = int(gib * GIB)
    return Machine(tuple(Gpu(index, free, free) for index in range(gpus)), cores, int(memory_gib * GIB))


def plan_for(computer: Machine, *demands: Demand) -> tuple[Plan, dict[str, Assignment]]:
    plan = make_plan(computer, demands)
    return plan, dict(plan.models)


def test_without_gpus_models_share_the_cores() -> None:
    plan, models = plan_for(machine(0), TARGET, DRAFTER)
    target, drafter = models["target"], models["drafter"]
    assert (target.num_gpus, target.gpus, drafter.num_gpus, drafter.colocated_with) == (0, (), 0, None)
    assert target.threads is not None
    assert drafter.threads is not None
    assert target.threads > drafter.threads >= 1
    assert target.threads + drafter.threads <= 15  # a core is left for HTTP
    assert plan.gpus == ()


def test_on_few_cores_a_drafter_takes_turns_with_its_target() -> None:
    _, models = plan_for(machine(0, cores=2), TARGET, DRAFTER)
    assert (models["target"].threads, models["drafter"].colocated_with) == (2, "target")


def test_a_file_keeps_its_replicas() -> None:
    _, models = plan_for(machine(0, cores=2), TARGET, SEPARATE)
    assert (models["target"].threads, models["drafter"].threads, models["drafter"].colocated_with) == (1, 1, None)


def test_a_single_gpu_is_shared_by_colocation() -> None:
    plan, models = plan_for(machine(1), TARGET, DRAFTER)
    target, drafter = models["target"], models["drafter"]
    assert (target.num_gpus, target.gpus, drafter.colocated_with, drafter.gpus) == (1, (0,), "target", (0,))
    room = int(80 * GIB * 0.9) - 17 * GIB
    assert target.kv_tokens == room // (2**17 + 2**15)
    assert plan.notes == ()


def test_a_separate_drafter_of_a_file_leaves_the_single_gpu_to_its_target() -> None:
    plan, models = plan_for(machine(1), TARGET, SEPARATE)
    assert (models["target"].num_gpus, models["drafter"].num_gpus, models["drafter"].threads) == (1, 0, 15)
    assert any("no GPU is left: drafter" in note for note in plan.notes)


def test_two_gpus_are_for_one_model_each() -> None:
    plan, models = plan_for(machine(2), TARGET, DRAFTER)
    assert (models["target"].gpus, models["drafter"].gpus) == ((0,), (1,))
    assert models["drafter"].colocated_with is None
    assert (plan.gpus, plan.notes) == ((0, 1), ())


def test_the_target_gets_the_gpu_with_the_most_free_memory() -> None:
    gpus = (Gpu(0, 24 * GIB, 5 * GIB), Gpu(1, 80 * GIB, 79 * GIB))
    plan, models = plan_for(Machine(gpus, 16, 200 * GIB), TARGET, DRAFTER)
    assert (models["target"].gpus, models["drafter"].gpus) == ((1,), (0,))
    assert plan.gpus == (1, 0)


def test_eight_gpus_leave_some_idle_and_say_so() -> None:
    plan, models = plan_for(machine(8), TARGET, DRAFTER)
    assert (models["target"].gpus, models["drafter"].gpus) == ((0,), (1,))
    assert plan.gpus == tuple(range(8))  # idle GPUs stay within reach of `consort scale`
    assert any(note.startswith("idle: GPU 2, 3, 4, 5, 6, 7") for note in plan.notes)
    _, models = plan_for(machine(8), replace(TARGET, replicas=7), DRAFTER)
    assert (models["target"].gpus, models["drafter"].gpus) == (tuple(range(7)), (7,))


def test_a_tensor_parallel_target_takes_several_gpus() -> None:
    _, models = plan_for(machine(8), replace(TARGET, tensor_parallel=4), DRAFTER)
    target = models["target"]
    assert (target.num_gpus, target.gpus, models["drafter"].gpus) == (1, (0, 1, 2, 3), (4,))
    assert target.size is not None
    assert target.size.weights_bytes == 4 * GIB
    _, models = plan_for(machine(2), replace(TARGET, tensor_parallel=2), DRAFTER)
    assert (models["drafter"].num_gpus, models["drafter"].colocated_with) == (0, None)
    with pytest.raises(ConfigError, match=r"models\.target\.tensor_parallel: all replicas need 4 GPUs .* 2 are free"):
        plan_for(machine(2), replace(TARGET, tensor_parallel=4))
    _, models = plan_for(machine(0), replace(TARGET, tensor_parallel=2))
    assert (models["target"].num_cpus, models["target"].threads) == (7, 7)  # a group needs bundles


def test_more_members_than_gpus_share_them_in_equal_parts() -> None:
    _, models = plan_for(machine(1), TARGET, MEMBER)
    for model in models.values():
        assert (model.num_gpus, model.memory_bytes) == (0.5, int(40 * GIB * 0.9))
    with pytest.raises(ConfigError, match=r"need 16\.00 GiB, and a share of a GPU has room for 10\.80 GiB"):
        plan_for(machine(1, gib=24), TARGET, MEMBER)


def test_numbers_of_gpus_that_were_configured_stay() -> None:
    _, models = plan_for(machine(2), replace(TARGET, num_gpus=0), SEPARATE)
    assert (models["target"].num_gpus, models["drafter"].num_gpus) == (0, 1)
    _, models = plan_for(machine(1), replace(TARGET, num_gpus=0.5), SEPARATE)
    assert (models["target"].num_gpus, models["target"].gpus) == (0.5, (0,))
    _, models = plan_for(machine(0, cores=4), replace(TARGET, num_gpus=0, threads=3), SEPARATE)
    assert (models["target"].threads, models["drafter"].threads) == (3, 1)


@pytest.mark.parametrize("other", [SEPARATE, MEMBER])
def test_models_get_what_is_left_of_a_gpu_that_was_configured_in_part(other: Demand) -> None:
    part = replace(TARGET, num_gpus=0.7)
    _, models = plan_for(machine(1), part, other)
    target, second = models["target"], models[other.name]
    assert [(model.num_gpus, model.gpus) for model in (target, second)] == [(0.7, (0,)), (0.3, (0,))]
    assert [model.memory_bytes for model in (target, second)] == [int(int(80 * GIB * a) * 0.9) for a in (0.7, 0.3)]
    plan, models = plan_for(machine(2), part, other)
    assert (models[other.name].num_gpus, models[other.name].gpus, plan.gpus) == (1, (1,), (0, 1))
    plan, models = plan_for(machine(2), replace(part, replicas=2), other, replace(SEPARATE, name="third"))
    assert (models["target"].gpus, models[other.name].num_gpus, models["third"].num_gpus) == ((0, 1), 0.3, 0.3)
    _, models = plan_for(machine(1), replace(TARGET, num_gpus=0.5, replicas=2), other)
    assert models[other.name].num_gpus == 0
    _, models = plan_for(machine(1), replace(TARGET, num_gpus=0.33, replicas=3), other)
    assert models[other.name].num_gpus == 0  # a hundredth has no room for it


def test_a_model_that_does_not_fit_names_what_would() -> None:
    with pytest.raises(ConfigError, match=r"need 16\.00 GiB, and the GPU has room for 9\.00 GiB.*tensor_parallel: 2"):
        plan_for(machine(2, gib=10), TARGET)
    with pytest.raises(ConfigError, match="take a smaller model, quantization: int4, or num_gpus: 0"):
        plan_for(machine(1, gib=10), TARGET)
    with pytest.raises(ConfigError, match=r"on the CPU need 16\.00 GiB, and there is room for 7\.20 GiB"):
        plan_for(machine(0, memory_gib=8), TARGET)


def test_a_model_that_is_spread_over_gpus_has_the_memory_of_all() -> None:
    size = ModelSize(weights_bytes=100 * GIB, kv_bytes=2**19, positions=32768)
    spread = Demand(name="target", size=size, num_gpus=2, devices=2, needs_gpu=True)
    plan, models = plan_for(machine(2), spread)
    target = models["target"]
    assert (target.num_gpus, target.gpus, target.max_length, plan.notes) == (2, (0, 1), None, ())
    assert target.size is not None
    assert target.size.weights_bytes == 50 * GIB
    assert target.kv_tokens == (int(80 * GIB * 0.9) - 50 * GIB) // 2**18
    with pytest.raises(ConfigError, match=r"need 50\.00 GiB, and the GPU has room for 36\.00 GiB.*, num_gpus: 4"):
        plan_for(machine(4, gib=40), spread)


def test_texts_are_shorter_where_memory_is_short() -> None:
    plan, models = plan_for(machine(1, gib=20), TARGET, DRAFTER)
    target, drafter = models["target"], models["drafter"]
    assert target.max_length is not None
    assert target.max_length < 8192
    assert drafter.max_length == target.max_length
    assert any("requests of up to" in note for note in plan.notes)
    with pytest.raises(ConfigError, match=r"there is room for .* tokens; take a smaller model"):
        plan_for(machine(1, gib=17.8), TARGET)
    _, models = plan_for(machine(1), TARGET)
    assert models["target"].max_length is None  # the model's own


def test_many_models_on_the_cpu_share_its_memory() -> None:
    members = [replace(MEMBER, name=f"m{index}", size=SMALL) for index in range(4)]
    _, models = plan_for(machine(0, memory_gib=44), *members)
    limits = [model.memory_bytes for model in models.values()]
    assert all(limit is not None and limit > GIB for limit in limits)
    assert sum(limit or 0 for limit in limits) < 44 * GIB * 0.6
    _, models = plan_for(machine(0), TARGET)
    assert models["target"].memory_bytes is None
    large = [replace(MEMBER, name=f"m{index}", size=replace(LARGE, weights_bytes=18 * GIB)) for index in range(3)]
    _, models = plan_for(machine(0, memory_gib=64), *large)
    assert [model.memory_bytes for model in models.values()] == [18 * GIB + int(10 * GIB * 0.5 / 3)] * 3


def test_unknown_sizes_are_planned_without_figures() -> None:
    _, models = plan_for(machine(1), replace(TARGET, size=None), replace(DRAFTER, size=None))
    assert (models["target"].num_gpus, models["target"].kv_tokens) == (1, None)


def test_a_model_for_a_gpu_is_refused_without() -> None:
    with pytest.raises(ConfigError, match=r"models\.target\.device: needs a GPU"):
        plan_for(machine(0), replace(TARGET, needs_gpu=True))


def test_gpus_that_cannot_be_used_are_mentioned() -> None:
    computer = replace(machine(0), unusable_gpus="1 GPU(s) stay idle: no CUDA")
    assert make_plan(computer, [TARGET]).notes == ("1 GPU(s) stay idle: no CUDA",)
