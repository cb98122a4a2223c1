"""Every GPU kernel against its reference on a device; skipped without one."""

import pytest
import torch

from batchinfer.executors.kernel_cases import MODELS, cases
from batchinfer.executors.kernel_device import _backend, _difference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CASES = [(model.name, case) for model in MODELS for case in cases(model)]


@pytest.mark.parametrize(("model", "case"), CASES, ids=[f"{name} {case.name}" for name, case in CASES])
def test_equals_the_reference(model, case):
    from batchinfer.kernels.common.triton_targets import current

    if case.needs_e4m3 and not current().has_e4m3:
        pytest.skip("needs products of e4m3")
    run = getattr(_backend(case, "gpu"), case.function)
    expected = case.reference or getattr(_backend(case, "reference"), case.function)
    assert _difference(run, expected, case.arguments("cuda")) <= 2e-2
