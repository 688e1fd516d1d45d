"""Generate text with a model that no rank could hold: ZeRO-3, its shards in the host's memory.

    torchrun --standalone --nproc-per-node 2 examples/zero_inference.py --model FOLDER
    torchrun --standalone --nproc-per-node 2 examples/zero_inference.py   # a small Llama, untrained

FOLDER is what `save_pretrained` writes: config.json and safetensors. The model is made on the
meta device, each rank reads its own rows of each weight from the files and keeps them on the host,
and a weight is gathered on the device where it is used. transformers' own `generate` runs, with its
cache; each rank continues prompts of its own, and all go on until the last has ended
(`synced_gpus`).

A weight crosses the links once for each token, so the tokens of many prompts should share it:
tokens/s grow with `--batch` until compute is what takes time. Nothing is compiled: the cache grows
by a token a step, and each length would be another graph.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where `examples` lies

import fxzero
from examples.benchmarks.measure import peak_meter, release_free_memory, timed_s
from examples.meter import mebibytes
from examples.ranks import rank, set_threads, world_size

SMALL = LlamaConfig(
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=4096,
    max_position_embeddings=512,
    eos_token_id=None,
)


def sharded(folder: Path | None) -> PreTrainedModel:
    """The model at ZeRO-3; no rank ever holds all of it."""
    config = SMALL if folder is None else AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    fxzero.shard(model, zero=3, offload=True)
    if folder is not None:
        read_weights(model, folder)
    return model.eval()


@torch.no_grad()
def read_weights(model: nn.Module, folder: Path) -> None:
    """Fill the model's shards from a folder's safetensors: of each weight this rank's rows.

    Raises:
        SystemExit: the files lack a weight, or have another shape.
    """
    state = model.state_dict()
    missing = dict(state)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys() & state.keys():
                rows = weights.get_slice(name)
                whole = state[name]
                if tuple(rows.get_shape()) != tuple(whole.shape):
                    sys.exit(f"{file}: {name} is {rows.get_shape()}, not {tuple(whole.shape)}")
                here, first, last = rows_here(whole)
                here.copy_(rows[first:last] if whole.ndim else weights.get_tensor(name))
                del missing[name]
    tied = {id(model.get_parameter(name)) for name in state if name not in missing}
    lost = [name for name in missing if id(model.get_parameter(name)) not in tied]
    if lost:
        sys.exit(f"{folder} has no weights for {', '.join(lost[:3])} and {len(lost) - 1} more")


def rows_here(value: Tensor) -> tuple[Tensor, int, int]:
    """A rank's part of a weight, and which rows it is: equal ones, the last ranks' fewer."""
    if not isinstance(value, DTensor) or not isinstance(value.placements[0], Shard):
        local = value.to_local() if isinstance(value, DTensor) else value
        return local, 0, len(value) if value.ndim else 0
    each = -(-len(value) // world_size())
    local = value.to_local()
    first = min(rank() * each, len(value))
    return local, first, first + len(local)


def peak_beside(call: Callable[[], object], device: str) -> int:
    """The most that a call takes at once beside what was there: of tensors on CUDA, else of the
    process."""
    memory = peak_meter(device)
    release_free_memory()
    memory.reset()
    before = memory.now_bytes()
    call()
    return memory.peak_bytes() - before


def prompts_of(batch: int, length: int, vocab_size: int) -> Tensor:
    """Random prompts of this rank, (batch, length), other ones on each."""
    generator = torch.Generator().manual_seed(rank())
    return torch.randint(3, vocab_size, (batch, length), generator=generator)


def main() -> None:
    """Generate, and say what it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder; without one a small Llama")
    parser.add_argument("--batch", type=int, default=4, help="prompts of each rank")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--output", type=Path, help="write figures and all ranks' tokens as JSON")
    args = parser.parse_args()
    fxzero.init_distributed(from_host=True)
    set_threads(None)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = sharded(args.model)
    parameters = list(model.parameters())
    whole = sum(p.numel() * p.element_size() for p in parameters)
    here = sum(rows_here(p)[0].nbytes for p in parameters)
    prompts = prompts_of(args.batch, args.prompt, model.config.vocab_size).to(device)

    def generate(new_tokens: int) -> Tensor:
        return model.generate(
            prompts,
            max_new_tokens=new_tokens,
            do_sample=False,
            synced_gpus=world_size() > 1,
            pad_token_id=0,
        )

    generate(2)  # what is made once: connections, threads
    beside = peak_beside(lambda: generate(args.new_tokens), device)
    tokens, seconds = timed_s(device, lambda: generate(args.new_tokens))

    made, besides = [tokens.tolist()], [beside]
    if dist.is_initialized():
        made, besides = [[]] * world_size(), [0] * world_size()
        dist.all_gather_object(made, tokens.tolist())
        dist.all_gather_object(besides, beside)
    figures = {
        "model_bytes": whole,
        "shard_bytes": here,
        "gathered_and_cache_bytes": max(besides),
        "new_tokens_per_s": args.new_tokens * args.batch * world_size() / seconds,
    }
    tokens_of_all = [row for rows in made for row in rows]
    if rank() == 0:
        print(
            f"the model has {mebibytes(whole)}; a rank keeps {mebibytes(here)} of it on the host, "
            f"and takes {mebibytes(max(besides))} to generate, gathered weights and cache "
            f"together; {figures['new_tokens_per_s']:.1f} new tokens/s over {world_size()} ranks"
        )
        if args.output is not None:
            args.output.write_text(json.dumps({**figures, "tokens": tokens_of_all}) + "\n")


if __name__ == "__main__":
    main()
