"""`batchinfer quantize`: a model directory in, a quantised one out, layer by layer and resumable. Called by
cli/quantize."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer import __version__
from batchinfer.cache.paged_kv import TORCH_DTYPES
from batchinfer.conversion.calibration_batch import CalibrationBatch, make_batches
from batchinfer.conversion.calibration_text import CalibrationText, read_calibration_text
from batchinfer.conversion.checkpoint_files import TensorEntry, copy_beside, entry_of, put_json, write_weights
from batchinfer.conversion.layer_method import LayerMethod
from batchinfer.conversion.layer_run import DTYPE
from batchinfer.conversion.layer_tensors import Modules, read_layer, shapes
from batchinfer.conversion.memory import forecast
from batchinfer.conversion.options import QuantizeOptions
from batchinfer.conversion.progress import LayerProgress
from batchinfer.conversion.work_state import WorkState
from batchinfer.data.tokenizer import Tokenizer
from batchinfer.errors import UsageError
from batchinfer.models.checkpoint import SafetensorsCheckpoint
from batchinfer.models.families.common import WeightNames
from batchinfer.models.loader import load_spec, quantization_config, read_config
from batchinfer.models.resolve import ModelFiles, resolve_model
from batchinfer.models.spec import DecoderSpec
from batchinfer.process import peak_memory_bytes
from batchinfer.quantization.write_awq import awq_config
from batchinfer.quantization.write_compressed import fp8_config, packed_config, with_kv_scales
from batchinfer.quantization.write_gptq import gptq_config
from batchinfer.units import format_bytes, format_duration

_logger = logging.getLogger("batchinfer")


@dataclass(frozen=True, slots=True)
class _Job:
    options: QuantizeOptions
    files: ModelFiles
    spec: DecoderSpec
    names: WeightNames
    source: SafetensorsCheckpoint
    text: CalibrationText | None
    batches: list[CalibrationBatch]


def quantize_model(
    model: str | None, output: str, options: QuantizeOptions, report: Callable[[str], None] = _logger.info
) -> None:
    """Writes the quantised model to the directory `output`. Killed at any moment, the same call carries on; once done,
    it returns at once. Raises UsageError before any work where options, shapes or the directory do not allow it."""
    started = time.monotonic()
    job = _prepare(model, options, report)
    state = WorkState(Path(output).expanduser(), _record(job))
    try:
        if state.is_finished:
            state.clean()  # a kill just after the end may have left layers behind
            report(f"{output} is finished already")
            return
        _quantize_layers(job, state, report)
        _write(job, state)
        seconds = time.monotonic() - started
        state.finish({"seconds_of_last_run": round(seconds, 1), "peak_memory_bytes": peak_memory_bytes()})
    finally:
        state.release()
    peak = format_bytes(peak_memory_bytes())
    report(f"done in {format_duration(seconds)}, peak memory {peak}: {output}")


def _prepare(model: str | None, options: QuantizeOptions, report: Callable[[str], None]) -> _Job:
    files = resolve_model(model, report)
    report(files.description)
    if quantization_config(files.path) is not None:
        raise UsageError(f"--model {files.path}: its weights are quantised already; name the 16-bit model")
    spec, names = load_spec(files.path), WeightNames()
    options.check_shapes(shapes(spec, Modules.of(names)))
    if options.needs_calibration and options.calibration_length > spec.max_position_embeddings:
        raise UsageError(
            f"--calibration-length {options.calibration_length}: the model has positions for "
            f"{spec.max_position_embeddings} tokens"
        )
    text = read_calibration_text(options, Tokenizer.load(files.path)) if options.needs_calibration else None
    batches = make_batches([torch.from_numpy(ids).long() for ids in text.sequences], spec) if text else []
    _describe(options, spec, text, report)
    return _Job(options, files, spec, names, SafetensorsCheckpoint(files.path), text, batches)


def _describe(
    options: QuantizeOptions, spec: DecoderSpec, text: CalibrationText | None, report: Callable[[str], None]
) -> None:
    if text is not None:
        few = "; more text makes better weights, see --calibration" if text.is_small else ""
        report(f"calibration: {len(text.sequences)} windows, {text.num_tokens:,} tokens of {text.source}{few}")
    memory = forecast(spec, options, text.num_tokens if text else 0)
    report(
        f"memory at most: {format_bytes(memory.total_bytes)} beside the libraries (a layer: "
        f"{format_bytes(memory.activation_bytes)} activations, {format_bytes(memory.batch_bytes)} of a batch, "
        f"{format_bytes(memory.layer_bytes)} weights, {format_bytes(memory.working_bytes)} working; to write the file: "
        f"{format_bytes(memory.writing_bytes)})"
    )


def _record(job: _Job) -> dict[str, Any]:
    return {
        "batchinfer": __version__,
        "model": job.files.source,
        "licence": job.files.licence,
        "model_fingerprint": job.files.fingerprint,
        "calibration": job.text.source if job.text else None,
        "calibration_fingerprint": job.text.fingerprint if job.text else None,
        **job.options.record(),
    }


def _quantize_layers(job: _Job, state: WorkState, report: Callable[[str], None]) -> None:
    num_layers, done = job.spec.num_layers, state.layers_done()
    if done:
        report(f"carrying on after {done} of {num_layers} layers")
    if done == num_layers:
        return
    hidden = None
    if job.batches:
        hidden = state.hidden_before(done) if done else _embedded(job)
    method = LayerMethod(job.options, job.spec, job.names, job.batches, _scale_dtype(job.spec))
    progress = LayerProgress(num_layers, len(list(Modules.of(job.names))), done)
    try:
        for index in range(done, num_layers):
            layer = read_layer(job.source, job.spec, job.names, index)
            tensors = method.quantize(index, layer, hidden, progress.advance)
            state.finish_layer(index, tensors, hidden if index + 1 < num_layers else None)
    finally:
        progress.close()


def _embedded(job: _Job) -> Tensor:
    """Hidden states before the first layer, bf16 [num_tokens, hidden_size]."""
    embedding = job.source.read(job.names.embedding)
    return torch.cat([F.embedding(batch.token_ids, embedding) for batch in job.batches]).to(DTYPE)


def _scale_dtype(spec: DecoderSpec) -> torch.dtype:
    return TORCH_DTYPES[spec.dtype or "bf16"]


def _write(job: _Job, state: WorkState) -> None:
    write_weights(state.storage, _entries(job, state))
    copy_beside(state.storage, job.files.path)
    config = {**read_config(job.files.path), "quantization_config": written_config(job.options)}
    put_json(state.storage, "config.json", config)


def _entries(job: _Job, state: WorkState) -> list[TensorEntry]:
    """The layers' new tensors, and all others as the model has them."""
    layers = tuple(job.names.layer.format(index) for index in range(job.spec.num_layers))
    kept = [name for name in job.source.names if not name.startswith(layers) and not name.endswith(job.names.derived)]
    return [
        *(entry_of(job.source, name) for name in kept if name == job.names.embedding),
        *(entry for index in range(job.spec.num_layers) for entry in state.layer_entries(index)),
        *(entry_of(job.source, name) for name in kept if name != job.names.embedding),
    ]


def written_config(options: QuantizeOptions) -> dict[str, Any]:
    """quantization_config of the finished config.json."""
    bits, group_size, symmetric = options.written_bits, options.group_size, options.is_symmetric
    if options.method == "fp8":
        config = fp8_config()
    elif options.written_format == "awq":
        return awq_config(group_size)
    elif options.written_format == "gptq":
        return gptq_config(bits, group_size, symmetric, options.act_order, f"batchinfer:{__version__}")
    else:
        config = packed_config(bits, group_size, symmetric)
    return with_kv_scales(config) if options.kv_cache_scales else config
