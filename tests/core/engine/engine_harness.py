"""An engine over a tiny model, driven step by step without a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from minisgl.core import Batch, Req, SamplingParams, StepArrays
from minisgl.engine.build import EngineRequest, build_engine
from minisgl.engine.contract import ForwardOutput
from minisgl.engine.engine import Engine
from minisgl.plugin.manager import PluginManager
from minisgl.plugin.records import LogitsProcessor
from minisgl.weights.resolve import open_model


def make_engine(
    folder: Path, processors: tuple[LogitsProcessor, ...] = (), **settings: object
) -> Engine:
    """Build an engine over a saved model through the ordinary road."""
    manager = PluginManager.bootstrap(env={})
    defaults = {"model": str(folder), "max_running_req": 8, "num_pages": 128, "page_size": 4}
    filled = manager.load_settings({**defaults, **settings}, env={})
    files = open_model(filled.model.model, "local", manager)
    return build_engine(
        EngineRequest(filled, manager, files, frozenset({2}), logits_processors=processors)
    )


@dataclass
class StepDriver:
    """Gives out rows and pages by hand and runs whole prompts and single tokens."""

    engine: Engine
    page_table: np.ndarray = field(init=False)
    num_used_pages: int = 0

    def __post_init__(self) -> None:
        limits = self.engine.limits
        max_pages = -(-limits.max_seq_len // limits.page_size)
        self.page_table = np.zeros((limits.max_running_reqs, max_pages), np.int32)

    def admit(self, uid: int, prompt: list[int], params: SamplingParams, max_len: int = 64) -> Req:
        """Give a prompt a row and all the pages that it will ever need."""
        req = Req(uid, np.array(prompt, np.int32), max_len, params)
        req.table_idx = uid
        count = -(-max_len // self.engine.limits.page_size)
        pages = np.arange(self.num_used_pages, self.num_used_pages + count)
        self.page_table[uid, :count] = pages
        self.num_used_pages += count
        return req

    def prefill(self, reqs: list[Req]) -> ForwardOutput:
        """Launch the whole prompts; their rows' pages are announced."""
        return self._launch(reqs, "prefill", is_new=True)

    def decode(self, reqs: list[Req]) -> ForwardOutput:
        """Launch one token each."""
        return self._launch(reqs, "decode", is_new=False)

    def generate(self, reqs: list[Req], num_tokens: int) -> list[list[int]]:
        """Run prefill and decode, one step behind like an overlapping scheduler."""
        pending = self.prefill(reqs)
        for _ in range(num_tokens - 1):
            launched = self.decode(reqs)
            self._record(reqs, pending)
            pending = launched
        self._record(reqs, pending)
        return [req.output_ids.tolist() for req in reqs]

    def _record(self, reqs: list[Req], output: ForwardOutput) -> None:
        for req, token in zip(reqs, output.wait().token_ids, strict=True):
            req.append_host(int(token))

    def _launch(self, reqs: list[Req], phase: str, is_new: bool) -> ForwardOutput:
        rows = np.array([r.table_idx for r in reqs], np.int32)
        announced = rows if is_new else rows[:0]
        num_pages = self.page_table.shape[1]
        arrays = StepArrays(
            table_idx=rows,
            cached_lens=np.array([r.cached_len for r in reqs], np.int32),
            seq_lens=np.array([r.device_len for r in reqs], np.int32),
            page_rows=np.repeat(announced, num_pages),
            page_cols=np.tile(np.arange(num_pages, dtype=np.int32), len(announced)),
            page_ids=self.page_table[announced].reshape(-1),
            page_table=self.page_table,
        )
        flags = [True] * len(reqs) if phase == "prefill" else []
        batch = Batch(list(reqs), "prefill" if phase == "prefill" else "decode", flags, arrays)
        output = self.engine.forward_batch(batch)
        for req in reqs:
            req.complete_one()
        return output
