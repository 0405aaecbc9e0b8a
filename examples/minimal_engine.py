"""A whole inference engine in one file: weights, forward pass, KV cache, greedy decoding.

    python examples/minimal_engine.py MODEL_FOLDER "The capital of France is" [NUM_TOKENS]

It runs Llama, Qwen2, Qwen3 and Mistral checkpoints (a folder with config.json, safetensors and
tokenizer.json) in float32, one sequence at a time, and imports nothing of minisgl. Everything
that an engine adds to it is about doing this for many requests at once, quickly: see
docs/from-minimal.md for the way from here to there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of every layer, ``[num_kv_heads, num_tokens, head_dim]`` each."""


class Model:
    """A decoder-only transformer; its forward pass is written out."""

    def __init__(self, folder: Path) -> None:
        """Read the configuration, and all weights into memory."""
        config = json.loads((folder / "config.json").read_text())
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config.get("num_key_value_heads") or self.num_heads
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // self.num_heads
        self.eps: float = config["rms_norm_eps"]
        rope = config.get("rope_parameters") or config  # transformers 5, and before
        kind = (config.get("rope_scaling") or rope).get("rope_type", "default")
        if kind != "default" or config.get("sliding_window") and "use_sliding_window" not in config:
            raise ValueError(f"{folder}: rope type {kind} or its sliding window: too much for here")
        theta = rope.get("rope_theta", 10000.0)
        self.inv_freq = theta ** -(torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        self.weights = {
            name: tensor.float()
            for path in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }

    def forward(self, ids: Tensor, cache: Cache) -> Tensor:
        """Compute new tokens behind those of ``cache``, and append theirs to it.

        Args:
            ids: ``[num_tokens]`` int64.
            cache: Of the sequence so far; empty at first.

        Returns:
            ``[vocab_size]`` logits of what follows the last token.
        """
        start = cache[0][0].shape[1] if cache else 0
        angles = torch.arange(start, start + len(ids))[:, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()  # [num_tokens, head_dim / 2]
        x = self.weights["model.embed_tokens.weight"][ids]  # [num_tokens, hidden_size]
        for i in range(self.num_layers):
            layer = f"model.layers.{i}."
            normed = self.norm(x, layer + "input_layernorm")
            x = x + self.attention(normed, layer + "self_attn.", cos, sin, cache, i)
            normed = self.norm(x, layer + "post_attention_layernorm")
            gate, up = (self.linear(normed, f"{layer}mlp.{n}_proj") for n in ("gate", "up"))
            x = x + self.linear(F.silu(gate) * up, layer + "mlp.down_proj")
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return head @ self.norm(x[-1], "model.norm")

    def attention(
        self, x: Tensor, name: str, cos: Tensor, sin: Tensor, cache: Cache, layer: int
    ) -> Tensor:
        """Attend to everything cached and, causally, to the new tokens themselves."""
        q, k, v = (self.linear(x, f"{name}{n}_proj").view(len(x), -1, self.head_dim) for n in "qkv")
        if name + "q_norm.weight" in self.weights:  # Qwen3
            q, k = self.norm(q, name + "q_norm"), self.norm(k, name + "k_norm")
        q, k = (rotate(each, cos, sin).transpose(0, 1) for each in (q, k))  # heads first
        v = v.transpose(0, 1)
        if layer == len(cache):
            cache.append((k, v))
        else:
            cache[layer] = k, v = (
                torch.cat((cache[layer][0], k), dim=1),
                torch.cat((cache[layer][1], v), dim=1),
            )
        num_new, num_all = q.shape[1], k.shape[1]
        is_seen = torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)
        out = F.scaled_dot_product_attention(q, k, v, is_seen, enable_gqa=True)
        return self.linear(out.transpose(0, 1).flatten(1), name + "o_proj")

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply by a weight; add its bias if the checkpoint has one."""
        return F.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Scale to a root mean square of 1, then by the weight."""
        return F.rms_norm(x, x.shape[-1:], self.weights[name + ".weight"], self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs ``(i, i + head_dim / 2)`` of ``[num_tokens, heads, head_dim]`` by angles."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@torch.inference_mode()
def generate(model: Model, ids: list[int], num_tokens: int) -> Iterator[int]:
    """Yield greedy tokens: the prompt in one forward pass, then one pass per token."""
    cache: Cache = []
    logits = model.forward(torch.tensor(ids), cache)
    for i in range(num_tokens):
        token = int(logits.argmax())
        yield token
        if i < num_tokens - 1:
            logits = model.forward(torch.tensor([token]), cache)


def main() -> None:
    """Print a prompt and what follows it."""
    folder, prompt = Path(sys.argv[1]), sys.argv[2]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    print(prompt, end="", flush=True)
    output: list[int] = []
    for token in generate(Model(folder), ids, int(sys.argv[3]) if len(sys.argv) > 3 else 32):
        before = tokenizer.decode(output)
        output.append(token)
        print(tokenizer.decode(output)[len(before) :], end="", flush=True)
    print()


if __name__ == "__main__":
    main()
