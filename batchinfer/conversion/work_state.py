"""What a quantisation leaves in its output directory until it is finished: one durable file a finished layer, and the
hidden states that the next layer starts from. Used by quantize_job."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from batchinfer.conversion.checkpoint_files import TensorEntry, entries_of, put_json
from batchinfer.data.local_storage import LocalStorage
from batchinfer.errors import UsageError

FOLDER = "_quantize"
RECORD = "batchinfer_quantize.json"  # stays in the finished directory
_PLAN = f"{FOLDER}/plan.json"
_NAMES = ("model", "licence", "calibration")  # for people; fingerprints tell whether it is the same


class WorkState:
    """A directory that holds nothing, this job unfinished, or this job finished.

    record: what the output depends on. Raises UsageError where the directory holds something else or another process
    works on it.
    """

    def __init__(self, output: Path, record: Mapping[str, Any]) -> None:
        self.storage = LocalStorage(output, f"{FOLDER}/tmp")
        self._output = output
        self._record = dict(record)
        self._check_contents()
        self._lock = self.storage.lock(f"{FOLDER}/lock")
        self.storage.delete_folder(f"{FOLDER}/tmp")
        if not self.is_finished:
            put_json(self.storage, _PLAN, self._record)

    @property
    def is_finished(self) -> bool:
        return self.storage.exists(RECORD)

    def layers_done(self) -> int:
        done = 0
        while self.storage.exists(_layer_name(done)):
            done += 1
        return done

    def hidden_before(self, layer: int) -> Tensor:
        from safetensors.torch import load_file

        return load_file(self._output / _hidden_name(layer))["hidden"]

    def finish_layer(self, layer: int, tensors: Mapping[str, Tensor], hidden: Tensor | None) -> None:
        """Durable on return. hidden: what the next layer starts from; None where layers need no input."""
        from safetensors.torch import save

        if hidden is not None:  # first, as the layer's file is what counts it as done
            self.storage.put(_hidden_name(layer + 1), save({"hidden": hidden}))
        self.storage.put(_layer_name(layer), save({name: tensor.contiguous() for name, tensor in tensors.items()}))
        self.storage.delete(_hidden_name(layer))

    def layer_entries(self, layer: int) -> list[TensorEntry]:
        return entries_of(self._output / _layer_name(layer))

    def finish(self, figures: Mapping[str, Any]) -> None:
        """The last step: from here on the directory is a model."""
        put_json(self.storage, RECORD, {**self._record, **figures})
        self.clean()

    def clean(self) -> None:
        """Of a finished job: lets go of the directory and leaves the model alone in it."""
        self.release()
        self.storage.delete_folder(FOLDER)

    def release(self) -> None:
        self._lock.release()

    def _check_contents(self) -> None:
        """An unfinished or finished job of the same record, or nothing."""
        held = [name for name in self.storage.list() if name != FOLDER]
        found = next((name for name in (_PLAN, RECORD) if self.storage.exists(name)), None)
        if found is None:
            if held:
                raise UsageError(f"--output {self._output}: it holds {held[0]} already; choose an empty directory")
            return
        earlier = json.loads(self.storage.read(found))
        for name, value in self._record.items():
            if name not in _NAMES and earlier.get(name) != value:
                raise UsageError(
                    f"--output {self._output}: it was begun with {name} {earlier.get(name)!r}, not {value!r}; give "
                    "that again, or choose another directory"
                )


def _layer_name(layer: int) -> str:
    return f"{FOLDER}/layer-{layer:05}.safetensors"


def _hidden_name(layer: int) -> str:
    return f"{FOLDER}/hidden-{layer:05}.safetensors"
