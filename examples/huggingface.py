"""A Hugging Face model from its configuration, trained on this file's own bytes, and exported.

$ planaria run --workers 3 --spares 1 --preload transformers examples/huggingface.py OUT
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import planaria

STEPS = 20
TEXT = torch.tensor(list(Path(__file__).read_bytes()))


def build(shard: planaria.Shard) -> dict[str, Any]:
    """The very objects that ``transformers`` makes; its schedule is torch's, and so is a part."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = DistributedDataParallel(LlamaForCausalLM(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 3, STEPS)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def batch(step: int, shard: planaria.Shard) -> Tensor:
    """Four pieces of the text, B=4 by T=64 bytes, for this shard in this step."""
    generator = torch.Generator().manual_seed(step * shard.world + shard.index)
    begins = torch.randint(len(TEXT) - 64, (4,), generator=generator).tolist()
    return torch.stack([TEXT[begin : begin + 64] for begin in begins])


def export(model: LlamaForCausalLM, folder: Path) -> None:
    """Under another name first: where a worker is lost meanwhile, this is done again."""
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    model.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def main() -> None:
    with planaria.join(build) as run:
        for attempt in run.attempts(until=STEPS):
            with attempt:
                ids_BT = batch(attempt.step, run.shard)
                loss = run.model(input_ids=ids_BT, labels=ids_BT).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
                run.optimizer.step()
                run.schedule.step()
                run.optimizer.zero_grad()
                attempt.log(loss=loss)

        def duty() -> None:
            if run.shard.index == 0:
                export(run.model.module, Path(sys.argv[1]))

        run.final(duty)


if __name__ == "__main__":
    main()
