"""Is our block slower than Megatron-Core's? Both on the same ranks, of the same sizes, from the same weights.

    python -m venv PEER && PEER/bin/pip install torch==2.13.0 megatron-core==0.16.1       (Python 3.11)
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.block --peer-python PEER/bin/python

Each contender runs in processes of its own, in several rounds whose order alternates; medians are compared, after a check that
output, input gradient and weight gradients agree. Megatron-Core's TransformerLayer has its local spec (no TransformerEngine),
and three forms: plain; with its attention replaced by torch's SDPA, which ours uses; and with its fused SwiGLU besides, which
torch.compile makes.

Started by ``compare`` through torchrun, this file is one contender: it then imports nothing but torch and what it times.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import CLOCKS, ROOT, Ranks, Spread, measure, table

PEERS = {"megatron": "plain", "megatron-sdpa": "with SDPA", "megatron-fused": "with SDPA and fused SwiGLU"}
HOW = (
    "To see Megatron-Core beside it: `python -m venv PEER && PEER/bin/pip install torch==2.13.0 megatron-core==0.16.1` with "
    "Python 3.11, then the same command with `--peer-python PEER/bin/python`."
)

Size = tuple[int, int, int, int]
"""dim, batch, seq, steps a sample"""

Step = Callable[[], tuple[Tensor, Tensor, list[Tensor]]]
"""Forward and backward, giving y [batch, seq, dim], dx of the same shape, and the gradients of this rank's weights."""


def compare(sizes: Sequence[Size], ranks: int, python: str, clock: str, rounds: int = 3) -> tuple[str, dict[str, Any]]:
    """A Markdown table of our block beside Megatron-Core's in ``python``, and all samples."""
    rows, samples = [], {}
    contenders = ["tpblock", *PEERS]
    for size in sizes:
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        prints: dict[str, list[float]] = {}
        for turn in range(rounds):
            for name in contenders if turn % 2 == 0 else reversed(contenders):
                run = _start(sys.executable if name == "tpblock" else python, ranks, name, clock, size)
                seconds[name] += run["seconds"]
                prints[name] = run["fingerprint"]
        for name in PEERS:
            torch.testing.assert_close(
                torch.tensor(prints[name]), torch.tensor(prints["tpblock"]), rtol=1e-4, atol=1e-4,
                msg=lambda m, n=name, s=size: f"{n} and tpblock differ at {s}: {m}",
            )  # fmt: skip
        spreads = {name: Spread.of([1000 * s for s in values]) for name, values in seconds.items()}
        row = {"block": f"dim {size[0]}, {size[1] * size[2]} tokens", "tpblock, ms": f"{spreads['tpblock']:.2f}"}
        for name, what in PEERS.items():
            ratio = spreads["tpblock"].median / spreads[name].median
            row[f"Megatron-Core {what}, ms; ratio"] = f"{spreads[name]:.2f}; **{ratio:.2f}**"
        rows.append(row)
        samples[f"{row['block']}, processes in turns"] = seconds
    return f"{table(rows)}\n\nRatios are ours over theirs.", samples


def _start(python: str, ranks: int, contender: str, clock: str, size: Size) -> dict[str, list[float]]:
    """What rank 0 of a contender prints, run by torchrun from the root of the clone."""
    torchrun_variables = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(torchrun_variables)}
    torchrun = [python, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    arguments = ["-m", "benchmarks.peer", contender, clock, *map(str, size)]
    run = subprocess.run([*torchrun, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{contender} ended with exit code {run.returncode}:\n{run.stderr[-4000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def weights(dim: int, d_ff: int) -> dict[str, Tensor]:
    """The global weights that every contender starts from, under our names."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"attention.qkv": (3 * dim, dim), "attention.out": (dim, dim), "feedforward.up": (2 * d_ff, dim)}
    shapes["feedforward.down"] = (dim, d_ff)
    return {f"{name}.weight": 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def tpblock_step(dim: int, x: Tensor, dy: Tensor) -> Step:
    from parallel.group import TPGroup
    from parallel.state import scatter_state
    from tpblock import Block, Context, ModelConfig

    config = ModelConfig(vocab_size=1, dim=dim, layers=1, heads=dim // 64)
    group = TPGroup.from_environment()
    block = Block(config, group=group)
    norms = {f"norm_{i}.weight": torch.ones(dim) for i in (1, 2)}
    scatter_state(block, weights(dim, config.d_ff) | norms, group)
    context = Context.build(config, x.shape[0], x.shape[1], device=x.device, dtype=x.dtype)
    x.requires_grad_()
    matrices = [p for p in block.parameters() if p.ndim == 2]

    def step() -> tuple[Tensor, Tensor, list[Tensor]]:
        block.zero_grad(set_to_none=True)
        x.grad = None
        y = block(x, context)
        y.backward(dy)
        return y, x.grad, [p.grad for p in matrices]

    return step


def megatron_step(dim: int, x: Tensor, dy: Tensor, *, sdpa: bool, fused: bool) -> Step:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer

    # It asks for the CUDA device and its generators wherever it makes a buffer or drops out (with probability 0 here).
    torch.cuda.current_device = lambda: torch.device("cpu")
    tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(ranks)
    heads, d_ff = dim // 64, -(-(8 * dim // 3) // 64) * 64
    config = TransformerConfig(
        num_layers=1,
        hidden_size=dim,
        num_attention_heads=heads,
        ffn_hidden_size=d_ff,
        tensor_model_parallel_size=ranks,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=fused,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
    )
    submodules = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    if sdpa:
        submodules.self_attention.submodules.core_attention = SDPA
    layer = TransformerLayer(config, submodules, layer_number=1)
    full = weights(dim, d_ff)
    # Its rows go head by head (q, k, v of one, then of the next); gate and up as ours.
    qkv = full["attention.qkv.weight"].view(3, heads, 64, dim).transpose(0, 1).chunk(ranks)[rank].reshape(-1, dim)
    up = full["feedforward.up.weight"].view(2, d_ff, dim).chunk(ranks, 1)[rank].reshape(-1, dim)
    out, down = (full[name].chunk(ranks, 1)[rank] for name in ("attention.out.weight", "feedforward.down.weight"))
    matrices = [
        layer.self_attention.linear_qkv.weight,
        layer.self_attention.linear_proj.weight,
        layer.mlp.linear_fc1.weight,
        layer.mlp.linear_fc2.weight,
    ]
    with torch.no_grad():
        for parameter, value in zip(matrices, (qkv, out, up, down), strict=True):
            parameter.copy_(value)
    seq = x.shape[1]
    angles = torch.arange(seq)[:, None] * 10_000.0 ** -(torch.arange(0, 64, 2) / 64)
    rotary = torch.cat([angles, angles], -1)[:, None, None]
    mask = torch.ones(1, 1, seq, seq, dtype=torch.bool).triu(1)
    x, dy = (t.transpose(0, 1).contiguous() for t in (x, dy))  # its activations are [seq, batch, dim]
    x.requires_grad_()

    def step() -> tuple[Tensor, Tensor, list[Tensor]]:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        y, _ = layer(x, attention_mask=mask, rotary_pos_emb=rotary)
        y.backward(dy)
        return y.transpose(0, 1), x.grad.transpose(0, 1), [p.grad for p in matrices]

    return step


class SDPA(torch.nn.Module):
    """In the place of Megatron-Core's DotProductAttention."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        """[seq, batch, heads, head_dim] each -> [seq, batch, heads * head_dim]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def fingerprint(y: Tensor, dx: Tensor, gradients: list[Tensor]) -> list[float]:
    """Numbers that agree where the results do: y and dx along a random direction, and the norm of the weight gradients."""
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).double()
    squares = torch.stack([g.double().square().sum() for g in gradients]).sum()
    dist.all_reduce(squares)
    scale = probe.norm()
    return [float((t.detach().double() * probe).sum() / scale) for t in (y, dx)] + [float(squares.sqrt())]


def main() -> None:
    contender, clock, (dim, batch, seq, steps) = *sys.argv[1:3], map(int, sys.argv[3:])
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(batch, seq, dim, generator=generator) for _ in range(2))
    if contender == "tpblock":
        step = tpblock_step(dim, x, dy)
    else:
        step = megatron_step(dim, x, dy, sdpa=contender != "megatron", fused=contender == "megatron-fused")
    numbers = fingerprint(*step())
    seconds = measure({contender: step}, Ranks(x.device), rounds=5, steps=steps, clock=CLOCKS[clock])[contender]
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "fingerprint": numbers}), flush=True)
    dist.barrier()
    os._exit(0)  # the many groups that Megatron-Core makes abort the process now and then when they are torn down


if __name__ == "__main__":
    main()
