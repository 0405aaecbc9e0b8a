from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl.errors import ModelError
from minisgl.layers.base import LoadTarget
from minisgl.weights.contract import WeightReader
from minisgl.weights.loader import load_weights
from minisgl.weights.safetensors_reader import SafetensorsReader

EVERY = slice(None)


class MemoryReader(WeightReader):
    """Tensors from a list, which may hold a name twice; counts what is read."""

    def __init__(self, *tensors: tuple[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.num_reads = 0

    def names(self) -> Iterator[str]:
        return (name for name, _ in self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(dict(self.tensors)[name].shape)

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        self.num_reads += 1
        return dict(self.tensors)[name][index]

    def where(self, name: str | None = None) -> str:
        return "some/file" if name else "some"

    def close(self) -> None:
        pass


def target(*shape: int, **fields: object) -> LoadTarget:
    return LoadTarget(torch.full(shape, -1.0), shape, (EVERY,) * len(shape), **fields)  # type: ignore[arg-type]  # fields vary


def test_parts_go_where_their_targets_say_in_the_model_s_dtype() -> None:
    fused = torch.zeros(4, 3, dtype=torch.bfloat16)
    q, k = torch.randn(4, 3), torch.randn(4, 3)
    targets = {
        "q": LoadTarget(fused[:2], (4, 3), (slice(2, 4), EVERY)),
        "k": LoadTarget(fused[2:], (4, 3), (slice(0, 2),)),
    }
    load_weights(targets, MemoryReader(("q", q), ("k", k)))
    assert torch.equal(fused, torch.cat([q[2:], k[:2]]).bfloat16())


def test_a_name_that_comes_twice_fills_both_places() -> None:
    first, second = target(2), target(2)
    load_weights([("x", first), ("x", second)], MemoryReader(("x", torch.ones(2))))
    assert first.dest is not None
    assert second.dest is not None
    assert first.dest.tolist() == second.dest.tolist() == [1.0, 1.0]


def test_a_tensor_of_which_this_rank_keeps_nothing_is_not_read() -> None:
    reader = MemoryReader(("x", torch.ones(2)))
    load_weights([("x", LoadTarget(None))], reader)
    assert reader.num_reads == 0


def test_missing_tensors_are_named_before_anything_is_read() -> None:
    reader = MemoryReader(("x", torch.ones(2)))
    with pytest.raises(ModelError, match="some: 2 tensors are missing: y, z"):
        load_weights({"x": target(2), "y": target(2), "z": target(1)}, reader)
    assert reader.num_reads == 0


def test_what_is_raised_before_a_tensor_leaves_it_and_the_rest_unread() -> None:
    reader = MemoryReader(*((name, torch.ones(2)) for name in "xyz"))

    def give_up() -> None:
        if reader.num_reads == 1:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        load_weights({name: target(2) for name in "xyz"}, reader, on_tensor=give_up)
    assert reader.num_reads == 1


def test_unexpected_tensors_are_named_with_their_file() -> None:
    reader = MemoryReader(("x", torch.ones(2)), ("model.vision.w", torch.ones(2)))
    with pytest.raises(ModelError, match=r"some/file: 1 tensors .* not have: model\.vision\.w"):
        load_weights({"x": target(2)}, reader)


def test_a_tensor_that_is_stored_twice_is_an_error() -> None:
    with pytest.raises(ModelError, match="some/file: tensor x is stored twice"):
        load_weights({"x": target(2)}, MemoryReader(("x", torch.ones(2)), ("x", torch.ones(2))))


def test_a_wrong_shape_is_named_with_both_shapes() -> None:
    with pytest.raises(ModelError, match=r"x has shape \[2, 3\], the configuration asks for \[3\]"):
        load_weights({"x": target(3)}, MemoryReader(("x", torch.ones(2, 3))))


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.cos_cached"]
)
def test_computed_buffers_of_old_checkpoints_are_passed_over(name: str) -> None:
    x = target(2)
    load_weights({"x": x}, MemoryReader((name, torch.ones(8)), ("x", torch.ones(2))))
    assert x.dest is not None
    assert x.dest.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("is_present", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_the_head_of_a_tied_model_is_passed_over(is_present: bool, is_known: bool) -> None:
    embedding = target(2)
    targets = [("model.embed_tokens.weight", embedding)]
    if is_known:
        targets.append(("lm_head.weight", LoadTarget(None, is_optional=True)))
    tensors = [("model.embed_tokens.weight", torch.ones(2))]
    if is_present:
        tensors.append(("lm_head.weight", torch.zeros(5)))
    load_weights(targets, MemoryReader(*tensors))
    assert embedding.dest is not None
    assert embedding.dest.tolist() == [1.0, 1.0]


def test_an_untied_model_without_a_head_says_what_may_be_wrong() -> None:
    targets = {"model.embed_tokens.weight": target(2), "lm_head.weight": target(2)}
    with pytest.raises(ModelError, match=r"lm_head\.weight; .*tie_word_embeddings: true"):
        load_weights(targets, MemoryReader(("model.embed_tokens.weight", torch.ones(2))))


def test_an_untied_model_with_a_head_loads_it() -> None:
    head = target(2)
    load_weights({"lm_head.weight": head}, MemoryReader(("lm_head.weight", torch.ones(2))))
    assert head.dest is not None
    assert head.dest.tolist() == [1.0, 1.0]


def experts() -> list[tuple[str, LoadTarget]]:
    dest = torch.zeros(2, 3)
    one_by_one = [(f"experts.{i}", LoadTarget(dest[i], (3,))) for i in range(2)]
    replaced = ("experts.0", "experts.1")
    stacked = LoadTarget(dest, (2, 3), (EVERY, EVERY), is_optional=True, replaces=replaced)
    return [*one_by_one, ("experts", stacked)]


@pytest.mark.parametrize("is_stacked", [False, True])
def test_experts_load_from_one_tensor_or_from_many(is_stacked: bool) -> None:
    values, targets = torch.randn(2, 3), experts()
    many = [("experts.0", values[0]), ("experts.1", values[1])]
    load_weights(targets, MemoryReader(*([("experts", values)] if is_stacked else many)))
    assert targets[-1][1].dest is not None
    assert torch.equal(targets[-1][1].dest, values)


def test_experts_in_both_forms_are_refused() -> None:
    tensors = [("experts", torch.ones(2, 3)), ("experts.1", torch.ones(3))]
    with pytest.raises(ModelError, match=r"has tensor experts and also experts\.1"):
        load_weights(experts(), MemoryReader(*tensors))


def test_experts_in_part_are_refused() -> None:
    with pytest.raises(ModelError, match=r"1 tensors are missing: experts\.1"):
        load_weights(experts(), MemoryReader(("experts.0", torch.ones(3))))


def test_eighteen_thousand_experts_load_in_seconds(tmp_path: Path) -> None:
    num_tensors = 128 * 48 * 3
    dest = torch.zeros(num_tensors, 4)
    names = [f"model.layers.{i}.weight" for i in range(num_tensors)]
    save_file({name: torch.ones(4) for name in names}, tmp_path / "model.safetensors")
    targets = [(name, LoadTarget(dest[i], (4,))) for i, name in enumerate(names)]
    start = time.process_time()
    load_weights(targets, SafetensorsReader(tmp_path))
    # linear work takes about 1 s; comparing every tensor with every target took minutes
    assert time.process_time() - start < 10
    assert dest.sum() == 4 * num_tensors


def test_memory_stays_at_the_kept_part_and_one_tensor(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        import torch
        from minisgl.layers.base import LoadTarget
        from minisgl.weights.loader import load_weights
        from minisgl.weights.safetensors_reader import SafetensorsReader
        def peak_mib():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        reader = SafetensorsReader(Path(sys.argv[1]))
        names = list(reader.names())
        kept = torch.zeros(len(names), 512, 8192)  # one half of each tensor, 16 MiB
        before = peak_mib()
        index = (slice(512, 1024), slice(None))
        targets = [(n, LoadTarget(kept[i], (1024, 8192), index)) for i, n in enumerate(names)]
        load_weights(targets, reader)
        sys.stdout.write(str(peak_mib() - before))
    """)
    write_sparse_checkpoint(tmp_path / "model.safetensors", num_tensors=8)
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    # zeros are not resident before they are written: 128 MiB kept, 16 read, some for the allocator
    assert int(out.stdout) < 128 + 48


def write_sparse_checkpoint(path: Path, num_tensors: int) -> None:
    """Write tensors of 32 MiB as holes of a file."""
    size = 1024 * 8192 * 4
    table = {
        f"t{i}": {"dtype": "F32", "shape": [1024, 8192], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(num_tensors)
    }
    header = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_tensors * size)


def test_no_bar_is_shown_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    load_weights({"x": target(2)}, MemoryReader(("x", torch.ones(2))), progress=True)
    assert capsys.readouterr() == ("", "")


def test_a_bar_is_shown_on_a_terminal_when_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load_weights({"x": target(2)}, MemoryReader(("x", torch.ones(2))), progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "loading weights" in err
    load_weights({"x": target(2)}, MemoryReader(("x", torch.ones(2))), progress=False)
    assert capsys.readouterr().err == ""
