"""One adapter per generation of FlashAttention; each turns a step into the library's call.

The new tokens' KV is in the pool already, and masks are aligned bottom-right in all of them: query
token i of a request with n new and m total tokens sees keys ``0 … m - n + i``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from minisgl.attention.contract import LayerAttention
from minisgl.errors import PluginError
from minisgl_attn_fa.generations import Generation
from minisgl_attn_fa.metadata import StepMetadata

_BLACKWELL = 100


class Adapter(ABC):
    """Calls one generation; made once, when the backend is."""

    def __init__(self, generation: Generation, sm: int, num_splits: int) -> None:
        """Import the library.

        Args:
            generation: Which.
            sm: Compute capability of the GPU.
            num_splits: The setting.

        Raises:
            PluginError: It is installed and cannot be imported.
        """
        self._sm = sm
        self._num_splits = num_splits
        try:
            # Only the chosen generation is imported: each loads a CUDA library or a compiler.
            self._library: Any = import_module(generation.module)  # no annotations to follow
        except (ImportError, OSError, RuntimeError) as error:
            raise PluginError(
                f"fa: {generation.module} of {generation.package} is installed and cannot be "
                f"imported ({type(error).__name__}: {error}); reinstall it for this torch and CUDA"
            ) from error

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: StepMetadata,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Attend with ``q[num_tokens, num_qo_heads, head_dim]``; returns the same shape.

        Args:
            q: The queries.
            k_cache: ``[num_pages, page_size, num_kv_heads, head_dim]``.
            v_cache: The same shape.
            metadata: Of the step, gathered.
            layer: Scale and window.
        """


class FlashAttention2(Adapter):
    """``flash_attn``: pages of multiples of 256 tokens."""

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: StepMetadata,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Decode by the kvcache call, which splits long sequences; prefill by the ragged one."""
        out: torch.Tensor
        if metadata.is_decode:
            out = self._library.flash_attn_with_kvcache(
                q.unsqueeze(1),  # [num_reqs, 1, num_qo_heads, head_dim]
                k_cache,
                v_cache,
                cache_seqlens=metadata.seq_lens,
                block_table=metadata.page_table,
                softmax_scale=layer.sm_scale,
                causal=True,
                window_size=_window(layer),
                num_splits=self._num_splits,
            )
            return out.squeeze(1)
        out = self._library.flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_k=metadata.cu_seqlens_k,
            max_seqlen_q=metadata.max_seqlen_q,
            max_seqlen_k=metadata.max_seqlen_k,
            softmax_scale=layer.sm_scale,
            causal=True,
            window_size=_window(layer),
            block_table=metadata.page_table,
        )
        return out


class FlashAttention3(Adapter):
    """``flash_attn_interface``, or the same call in ``sgl_kernel``: pages of any size."""

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: StepMetadata,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Attend by the kvcache call; a decode step is rectangular, which packs the heads."""
        options: dict[str, Any] = {  # passed on as keywords
            "cache_seqlens": metadata.seq_lens,
            "page_table": metadata.page_table,
            "softmax_scale": layer.sm_scale,
            "causal": True,
            "window_size": _window(layer),
            "num_splits": self._num_splits,
        }
        out: torch.Tensor
        if metadata.is_decode:
            out = self._library.flash_attn_with_kvcache(q.unsqueeze(1), k_cache, v_cache, **options)
            return out.squeeze(1)
        out = self._library.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_seqlen_q,
            **options,
        )
        return out


class FlashAttention4(Adapter):
    """``flash_attn.cute``: pages of any size, by TMA where a page is one key tile of 128."""

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: StepMetadata,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Attend by the ragged call, which serves a rectangular decode step as well."""
        window = layer.window_left
        options: dict[str, Any] = {  # passed on as keywords
            "seqused_k": metadata.seq_lens,
            "page_table": metadata.page_table,
            "max_seqlen_k": metadata.max_seqlen_k,
            "softmax_scale": layer.sm_scale,
            "causal": True,
            # None, not -1, is unlimited here.
            "window_size": (window, 0) if window >= 0 else (None, None),
            # Splitting asserts on compute capability 9.x.
            "num_splits": self._num_splits if self._sm >= _BLACKWELL else 1,
        }
        if metadata.is_decode:
            q = q.unsqueeze(1)  # [num_reqs, 1, num_qo_heads, head_dim]
        else:
            options["cu_seqlens_q"] = metadata.cu_seqlens_q
            options["max_seqlen_q"] = metadata.max_seqlen_q
        out: torch.Tensor = self._library.flash_attn_varlen_func(q, k_cache, v_cache, **options)[0]
        return out.squeeze(1) if metadata.is_decode else out


def build_adapter(generation: Generation, sm: int, num_splits: int) -> Adapter:
    """Make the adapter of a generation.

    Raises:
        PluginError: The library cannot be imported.
    """
    kinds: dict[str, Callable[[Generation, int, int], Adapter]] = {
        "2": FlashAttention2,
        "3": FlashAttention3,
        "4": FlashAttention4,
    }
    return kinds[generation.version](generation, sm, num_splits)


def _window(layer: LayerAttention) -> tuple[int, int]:
    """Return the window as 2 and 3 take it; -1 is unlimited."""
    return (layer.window_left, 0) if layer.window_left >= 0 else (-1, -1)
