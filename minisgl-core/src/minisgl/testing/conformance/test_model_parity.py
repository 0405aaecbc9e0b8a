"""An architecture that transformers knows too gives its logits, from its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from minisgl.testing.model_case import ModelCase, read_config, tiny_config, whole_prompts
from minisgl.testing.selection import TestedBackend
from minisgl.weights.local import FolderFiles

SEQ_LENS = (77, 1, 24, 40, 6)
TOLERANCE = 2e-3  # float32 logits of about 1 to 5 after a few layers, summed in another order


def test_logits_are_those_of_transformers(backend: TestedBackend, tmp_path: Path) -> None:
    reference = save_reference(backend, tmp_path)
    files = FolderFiles(tmp_path, "reference")
    reader = files.open_weights()
    case = ModelCase(backend, read_config(backend, files.config), reader)
    reader.close()
    logits = case.prefill(whole_prompts(SEQ_LENS)).cpu()
    for row, seq_len in enumerate(SEQ_LENS):
        ids = torch.from_numpy(case.batches.tokens[row, :seq_len]).long()
        with torch.inference_mode():
            expected = reference(ids[None]).logits[0, -1]
        torch.testing.assert_close(
            logits[row],
            expected,
            rtol=0,
            atol=TOLERANCE,
            msg=lambda text: (
                f"logits are those of transformers' {type(reference).__name__}\n{text}"
            ),
        )


def save_reference(backend: TestedBackend, folder: Path) -> PreTrainedModel:
    """Save transformers' model of the same configuration, with random weights."""
    fields = tiny_config(backend)
    (architecture,) = fields.pop("architectures")
    model_type = fields.pop("model_type", "")
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers does not know model_type {model_type!r}")
    config = AutoConfig.for_model(model_type, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms start at one and biases at zero
                start = 1.0 if name.endswith("weight") else 0.0
                parameter.data = start + 0.3 * torch.randn_like(parameter)
            else:
                parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    if type(model).__name__ != architecture:
        pytest.skip(f"transformers' class of model_type {model_type!r} has another name")
    model.eval()
    model.save_pretrained(folder)
    return model
