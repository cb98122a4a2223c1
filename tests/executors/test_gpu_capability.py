"""GPUs that are too old for the kernels."""

import pytest

from batchinfer.errors import UsageError
from batchinfer.executors.local import check_capability


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_newer_gpus_pass(capability):
    check_capability("GPU", capability)


def test_an_older_one_is_refused_in_one_line():
    with pytest.raises(UsageError) as caught:
        check_capability("Tesla T4", (7, 5))
    message = "--device cuda: the Tesla T4 has compute capability 7.5, the kernels need 8.0 or newer; use --device cpu"
    assert str(caught.value) == message
