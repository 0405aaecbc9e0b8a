"""The engine: runs the model over a batch the scheduler has made, and samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from tqdm import tqdm

from minisgl.core import Batch, Context, Req, SamplingParams, StepArrays
from minisgl.device import Stream
from minisgl.distributed.contract import Communicator
from minisgl.engine.contract import EngineLimits, ForwardOutput, StepEngine
from minisgl.engine.edited import EditedSampler, SampledStep
from minisgl.engine.graph import GraphKey, GraphRunner, StepOutput
from minisgl.engine.inputs import StepInputs
from minisgl.engine.logprobs import PendingLogprobs, PendingScores, ScorePlan, plan_scores
from minisgl.engine.origin import ErrorOrigin
from minisgl.engine.outputs import OutputRing
from minisgl.engine.prefill_graph import PrefillGraphs, PrefillStep
from minisgl.engine.row_params import RowParams
from minisgl.engine.slots import StepTensors
from minisgl.models.contract import Model
from minisgl.ops.contract import SamplingHints
from minisgl.plugin.records import LogitsProcessor
from minisgl.plugin.selection import SelectedBackend


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is assembled from.

    Attributes:
        device: Where it computes.
        model: Loaded and finalized.
        context: Filled.
        limits: Sizes, the same on all ranks.
        base_seed: Makes unseeded requests differ between engines; the same on all ranks.
        graph_sizes: Ascending decode batch sizes to capture.
        prefill_graph_sizes: Ascending numbers of prompt tokens to capture.
        logits_processors: Of hooks and of the caller; applied to every row, in order.
        backends: Name of what serves each kind.
        picked: The backends of these names.
    """

    device: torch.device
    model: Model
    context: Context
    limits: EngineLimits
    base_seed: int
    graph_sizes: tuple[int, ...] = ()
    prefill_graph_sizes: tuple[int, ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()
    backends: Mapping[str, str] = field(default_factory=dict)
    picked: tuple[SelectedBackend, ...] = ()


class Engine(StepEngine):
    """Computes steps, in order, on one stream of one device."""

    def __init__(self, parts: EngineParts, show_progress: bool = False) -> None:
        """Allocate buffers, capture graphs and warm up.

        Args:
            parts: What to assemble.
            show_progress: Whether to show a bar while graphs are captured.
        """
        self.limits = parts.limits
        self.backends = parts.backends
        self.picked = parts.picked
        self.device = parts.device
        self._parts = parts
        self._origin = ErrorOrigin(parts.picked)
        self._ctx = parts.context
        self._model = parts.model
        num_rows = parts.limits.max_running_reqs
        self._params = RowParams(
            num_rows, parts.limits.vocab_size, parts.base_seed, bool(parts.logits_processors)
        )
        self._stream = Stream(parts.device)
        self._flat_pool = self._ctx.token_pool.view(-1)
        self._outputs = OutputRing(num_rows, parts.device)
        self._graphs = GraphRunner(parts.graph_sizes)
        self._prefill_graphs = PrefillGraphs(parts.prefill_graph_sizes)
        # Weights, pools and tables were filled on the default stream, perhaps not to the end yet.
        self._stream.wait_for_current()
        with self._origin, torch.inference_mode(), self._stream.activate():
            # Their buffers grow: what a step still reads must go back to this stream's memory.
            self._inputs = StepInputs(self._ctx, self._params, num_rows)
            self._edited = EditedSampler(
                self._ctx, self._params, parts.limits, parts.logits_processors
            )
            self._warm_up()
            self._capture(show_progress)
            self._capture_prefill(show_progress)
        self._stream.synchronize()

    @property
    def comm(self) -> Communicator:
        """The collectives of this rank's tensor-parallel group."""
        return self._ctx.comm

    def forward_batch(self, batch: Batch) -> ForwardOutput:
        """Launch one step; see `StepEngine.forward_batch`."""
        with self._origin, torch.inference_mode(), self._stream.activate():
            return self._prefill(batch) if batch.is_prefill else self._decode(batch)

    def shutdown(self) -> None:
        """Wait for what runs, and leave the tensor-parallel group; safe to call twice."""
        self._stream.synchronize()
        # First the graphs: NCCL waits for the end of those that it was captured in.
        self._graphs.clear()
        self._prefill_graphs.clear()
        self._ctx.comm.shutdown()

    def _prefill(self, batch: Batch) -> ForwardOutput:
        """Compute prompt tokens; sample for the requests whose prompt ends here."""
        host = batch.host
        assert host is not None, "the scheduler sets batch.host"
        sampled = [
            req for req, is_last in zip(batch.reqs, batch.is_sampled, strict=True) if is_last
        ]
        self._params.admit(sampled)
        self._edited.admit(sampled)
        scores = plan_scores(batch)
        num_rows = len(sampled) + len(scores.rows)
        num_tokens = int((host.seq_lens - host.cached_lens).sum())
        size = self._prefill_graphs.padded_size(num_tokens, num_rows)
        tensors = self._inputs.load_prefill(batch, size, scores.rows)
        self._ctx.attn_backend.prepare_metadata(batch)
        if size is None:
            with self._ctx.forward_batch(batch):
                logits = self._model.forward()  # [num_sampled + num_scored, vocab_size]
        else:
            logits = self._prefill_graphs.replay(size, batch, num_tokens)[:num_rows]
        return self._sample_prefill(logits, tensors, batch, scores)

    def _sample_prefill(
        self, logits: torch.Tensor, tensors: StepTensors, batch: Batch, scores: ScorePlan
    ) -> ForwardOutput:
        """Sample where a prompt ends, and say how likely the prompts were that ask."""
        host = batch.host
        assert host is not None, "the scheduler sets batch.host"
        sampled = np.flatnonzero(batch.is_sampled)
        n = len(sampled)
        pending = PendingScores(logits[n:], scores) if scores.spans else None
        if not n:
            return self._outputs.launch(logits.new_empty(0, dtype=torch.int32), None, pending)
        rows, seq_lens = host.table_idx[sampled], host.seq_lens[sampled]
        is_all_greedy = self._params.is_all_greedy(rows)
        tokens = self._sample(logits[:n], tensors, is_all_greedy, self._params.hints(rows))
        output, reqs = StepOutput(logits[:n], tokens), [batch.reqs[i] for i in sampled]
        return self._finish(SampledStep(output, reqs, rows, seq_lens), pending)

    def _decode(self, batch: Batch) -> ForwardOutput:
        """Compute one token of each request, from a graph where one fits."""
        host = batch.host
        assert host is not None, "the scheduler sets batch.host"
        rows, n = host.table_idx, batch.size
        is_all_greedy = self._params.is_all_greedy(rows)
        size = self._graphs.padded_size(n)
        tensors = self._inputs.load_decode(batch, n if size is None else size)
        if size is None:
            self._ctx.attn_backend.prepare_metadata(batch)
            output = self._decode_step(batch, tensors, is_all_greedy, self._params.hints(rows))
        else:
            self._ctx.attn_backend.prepare_for_replay(batch)
            output = self._graphs.replay(GraphKey(size, is_all_greedy))
        output = StepOutput(output.logits[:n], output.tokens[:n])
        return self._finish(SampledStep(output, batch.reqs, rows, host.seq_lens))

    def _decode_step(
        self,
        batch: Batch,
        tensors: StepTensors,
        is_all_greedy: bool,
        hints: SamplingHints | None = None,
    ) -> StepOutput:
        """From the input tokens in the pool to the sampled ones in the pool; capturable.

        A captured step serves whatever parameters come later, so it is given no hints.
        """
        assert tensors.token_loc is not None, "a decode step reads the pool"
        batch.input_ids = self._flat_pool.index_select(0, tensors.token_loc)
        with self._ctx.forward_batch(batch):
            logits = self._model.forward()  # [padded_size, vocab_size]
        return StepOutput(logits, self._sample(logits, tensors, is_all_greedy, hints))

    def _sample(
        self,
        logits: torch.Tensor,
        tensors: StepTensors,
        is_all_greedy: bool,
        hints: SamplingHints | None,
    ) -> torch.Tensor:
        """Sample every row and write the tokens to the pool."""
        tokens = self._ctx.kernels.sample(logits, tensors.sampling, is_all_greedy, hints)
        self._flat_pool.index_copy_(0, tensors.write_loc, tokens)
        return tokens

    def _finish(self, step: SampledStep, scores: PendingScores | None = None) -> ForwardOutput:
        """Sample again where logits are to be edited, and bring everything to the host."""
        tokens = self._edited.sample(step)
        logprobs = None
        if self._params.has_logprobs(step.rows):
            logprobs = PendingLogprobs(step.output.logits, tokens, step.reqs)
        return self._outputs.launch(tokens, logprobs, scores)

    def _capture(self, show_progress: bool) -> None:
        """Capture every decode graph, largest first so that their memory is shared."""
        if not self._graphs.sizes:
            return
        self._ctx.attn_backend.init_graph(self._graphs.sizes[-1])
        keys = [
            GraphKey(size, greedy)
            for size in reversed(self._graphs.sizes)
            for greedy in (True, False)
        ]
        for key in tqdm(keys, desc="capturing graphs", disable=not show_progress, leave=False):
            batch = Batch(reqs=[], phase="decode")
            slot = self._inputs.load_dummy(key.size)
            self._inputs.attach(batch, slot)
            self._ctx.attn_backend.prepare_for_capture(batch)
            step = partial(self._decode_step, batch, slot.tensors, key.is_all_greedy)
            self._graphs.capture(key, step, self.device)

    def _capture_prefill(self, show_progress: bool) -> None:
        """Capture prefills, largest first so that their memory is shared."""
        sizes = self._prefill_graphs.sizes
        if not sizes:
            return
        pool, model = self._ctx.kv_pool.k_slots(0), self._model
        attended = pool.new_zeros(sizes[-1], model.num_qo_heads, model.head_dim)
        bar = tqdm(sizes[::-1], "capturing prefills", disable=not show_progress, leave=False)
        for size in bar:
            batch = self._inputs.load_dummy_prefill(size)
            step = PrefillStep(model, self._ctx, batch, attended[:size])
            self._prefill_graphs.capture(size, step)

    def _warm_up(self) -> None:
        """Run each kind of step once on the dummy page, so that no user waits for a compile."""
        limits = self.limits
        num_tokens = min(16, limits.max_seq_len - 1)
        params = SamplingParams(temperature=1.0, seed=0)
        req = Req(-1, np.zeros(num_tokens, np.int32), num_tokens + 1, params)
        req.table_idx = limits.max_running_reqs
        none = np.empty(0, np.int32)
        max_pages = self._ctx.page_table.shape[1]
        dummy_table = np.full(
            (req.table_idx + 1, max_pages), self._ctx.kv_pool.dummy_page, np.int32
        )

        def arrays(cached_len: int, seq_len: int) -> StepArrays:
            row = np.array([req.table_idx], np.int32)
            cached, total = (np.array([v], np.int32) for v in (cached_len, seq_len))
            return StepArrays(row, cached, total, none, none, none, dummy_table)

        batch = Batch([req], "prefill", [True], arrays(0, num_tokens))
        self._prefill(batch).wait()
        self._decode_eagerly(Batch([req], "decode", [], arrays(num_tokens - 1, num_tokens)))
        self._params.reset(req.table_idx)

    def _decode_eagerly(self, batch: Batch) -> None:
        """Run one decode step without a graph, greedy and sampled."""
        tensors = self._inputs.load_decode(batch, batch.size)
        self._ctx.attn_backend.prepare_metadata(batch)
        for is_all_greedy in (True, False):
            self._decode_step(batch, tensors, is_all_greedy)
