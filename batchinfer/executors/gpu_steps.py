"""How an engine's steps reach a GPU: through a queue that waits for nothing, decode steps as captured graphs. Called by
local.py."""

from dataclasses import dataclass

from batchinfer.cache.spec import KVCacheSpec
from batchinfer.engine.cuda_device import CudaCapture, CudaLane
from batchinfer.engine.cuda_graphs import GraphPlan, graph_sizes, graph_widths
from batchinfer.engine.key_stacks import KeyStacks
from batchinfer.engine.staged_queue import StagedQueue
from batchinfer.models.decoder import Decoder

STEPS_IN_FLIGHT = 2  # the host prepares a step while the one before runs


@dataclass(frozen=True, slots=True)
class GpuSteps:
    """The arguments of Engine that are a GPU's. graphs: None where kernels are launched one by one. key_stacks: None
    where attending together cannot pay."""

    queue: StagedQueue
    graphs: GraphPlan | None
    key_stacks: KeyStacks | None


def gpu_steps(decoder: Decoder, spec: KVCacheSpec, max_num_seqs: int, max_model_len: int, eager: bool) -> GpuSteps:
    """spec: of the cache. max_num_seqs: sequences that run at once at most."""
    queue, model = StagedQueue(CudaLane(decoder.device)), decoder.spec
    stacks = KeyStacks.make(model.num_q_heads, model.num_kv_heads, spec.block_size)
    if all(model.sliding_windows):  # the first keys are soon out of sight
        stacks = None
    if eager:
        return GpuSteps(queue, None, stacks)
    max_blocks = -(-max_model_len // spec.block_size)
    has_offsets = spec.per_token_scales and decoder.has_key_offsets  # attention multiplies with all of the table's
    widths = graph_widths(max_blocks, spec.block_size, cost_grows=has_offsets)
    return GpuSteps(queue, GraphPlan(CudaCapture(), graph_sizes(max_num_seqs), widths), stacks)
