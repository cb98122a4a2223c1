"""What a device that is there counts as, of those that the GPU kernels are built for."""

import pytest

pytest.importorskip("triton")

import triton
from batchinfer.kernels.common import triton_targets
from batchinfer.kernels.common.triton_targets import TARGETS, nearest
from triton.backends.compiler import GPUTarget

from batchinfer.errors import UsageError
from batchinfer.executors.local import check_amd


@pytest.mark.parametrize(
    ("arch", "name"),
    [(80, "sm_80"), (87, "sm_86"), (90, "sm_90"), (103, "sm_100"), (110, "sm_100"), (120, "sm_120"), (121, "sm_120")],
)
def test_a_cuda_device_counts_as_the_newest_kind_that_is_not_newer(arch, name):
    """Consumer devices with Blackwell's name have no more memory in a block than those before them."""
    assert nearest(GPUTarget("cuda", arch, 32)).name == name


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_amds_devices_of_the_third_generation_on_count_as_the_third(arch):
    assert nearest(GPUTarget("hip", arch, 64)) is TARGETS["gfx942"]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (GPUTarget("cuda", 75, 32), "sm_75: the GPU kernels need sm_80 or newer"),
        (GPUTarget("hip", "gfx90a", 64), "gfx90a: of AMD's devices the GPU kernels know gfx942 and gfx950"),
        (GPUTarget("hip", "gfx1100", 32), "gfx1100: of AMD's devices the GPU kernels know gfx942 and gfx950"),
        (GPUTarget("xpu", "pvc", 32), "xpu pvc: the GPU kernels know devices of NVIDIA and AMD only"),
    ],
)
def test_other_devices_are_refused_in_one_line(found, message):
    with pytest.raises(RuntimeError) as raised:
        nearest(found)
    assert str(raised.value) == message


class Driver:
    """Of Triton's, what tells the device; it counts how often the target is asked for."""

    def __init__(self, target, device):
        self.target = target
        self.device = device
        self.asked = 0

    def get_current_device(self):
        return self.device

    def get_current_target(self):
        self.asked += 1
        return self.target


@pytest.fixture
def use(monkeypatch):
    """Function (backend, arch, warp size) -> Driver: the active device is such a one, with a number not seen before."""
    monkeypatch.setattr(triton_targets, "is_interpreted", lambda: False)

    def install(*target):
        driver = Driver(GPUTarget(*target), object())
        monkeypatch.setattr(triton.runtime.driver, "_active", driver)
        return driver

    return install


def test_the_device_is_asked_what_it_is_once(use):
    driver = use("cuda", 89, 32)
    assert {triton_targets.current().name for _ in range(3)} == {"sm_89"}
    assert driver.asked == 1


def test_another_device_of_the_process_is_another_target(use):
    use("cuda", 90, 32)
    first = triton_targets.current()
    use("hip", "gfx942", 64)
    assert (first.name, triton_targets.current().name) == ("sm_90", "gfx942")


def test_a_run_on_an_unknown_device_of_amd_ends_with_a_line_that_says_what_to_do(use):
    use("hip", "gfx1100", 32)
    with pytest.raises(UsageError, match=r"^--device cuda: the Radeon is a gfx1100: .*gfx942.*; use --device cpu$"):
        check_amd("Radeon")
    use("hip", "gfx942", 64)
    check_amd("Instinct")
