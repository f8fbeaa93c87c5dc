"""What a model computes as one flat dictionary of global tensors, by ours on any ranks and by the oracle, and their distance.

Keys: ``logits``, ``loss``, ``grad/<oracle's name>``, ``norm/<p>``, ``update/<name>`` (weights after three clipped AdamW steps,
less those before), ``updates`` (all of these as one vector), ``block/out``, ``block/dx``, ``block/grad/<name>`` and the same
for ``stack``, each alone with a random cotangent.
"""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from parallel import collectives, rng
from parallel.gradients import clip_grad_norm_, grad_norm
from parallel.group import TPGroup
from parallel.regions import token_counts
from parallel.state import gather_state, scatter_state
from tests.helpers import own_collectives
from tests.oracle import OracleBlock, OracleDecoder, OracleStack
from tests.oracle_loading import is_softmax_invariant, oracle_config, part_of, random_state, to_oracle
from tests.plants import PLANTS
from tpblock import Block, Context, Decoder, ModelConfig, Stack

SEED = 11  # of the dropout masks
STEPS = 3
MAX_NORM = 0.25
ADAMW = {"lr": 3e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
NORMS = (1.0, 2.0, math.inf)

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model and a batch for it."""

    config: ModelConfig
    batch: int = 2
    seq: int = 7
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def loss_options(self) -> dict[str, float]:
        return {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}


@dataclass(frozen=True)
class Variant:
    """How to compute a case. ``plant`` names a mistake to make on purpose (see plants.py)."""

    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float64
    reduce_dtype: torch.dtype | None = None
    virtual_shards: int | None = None
    autocast: torch.dtype | None = None
    activation_checkpointing: bool = False
    loss_chunk: int = 5
    plant: str | None = None
    own_collectives: bool = False
    """Of the process group, as on GPUs, instead of direct exchanges."""

    def planted(self) -> AbstractContextManager[object]:
        return PLANTS[self.plant]() if self.plant else own_collectives() if self.own_collectives else nullcontext()

    def autocasting(self) -> AbstractContextManager[object]:
        """For one forward pass: autocast keeps the weights that it has converted, and would not see an optimizer's step."""
        return torch.autocast(torch.get_default_device().type, self.autocast) if self.autocast else nullcontext()


@dataclass(frozen=True)
class Inputs:
    """Global values: weights of a Decoder, ids and labels [batch, seq], activations and a cotangent [batch, seq, dim]."""

    state: dict[str, Tensor]
    ids: Tensor
    labels: Tensor
    x: Tensor
    cotangent: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """Rounded to ``dtype``, on this process's default device."""
        device = torch.get_default_device()
        state = {name: value.to(device, dtype) for name, value in self.state.items()}
        return Inputs(
            state,
            self.ids.to(device),
            self.labels.to(device),
            self.x.to(device, dtype),
            self.cotangent.to(device, dtype),
        )


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    config, generator = case.config, torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(config.vocab_size, (case.batch, case.seq), generator=generator) for _ in range(2))
    labels[:, 1] = -100
    shape = (case.batch, case.seq, config.dim)
    x, cotangent = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return Inputs(random_state(config, seed), ids, labels, x, cotangent)


# --- ours


def measure(group: TPGroup, case: Case, inputs: Inputs, variants: list[Variant]) -> list[Results]:
    """All results of each variant, on every rank of ``group``."""
    out = []
    for variant in variants:
        group = group.with_virtual_shards(variant.virtual_shards)
        with variant.planted():
            ready = inputs.to(variant.dtype)
            out.append(
                measure_decoder(group, case, ready, variant)
                | measure_part(group, case, ready, variant, Block)
                | measure_part(group, case, ready, variant, Stack)
            )
    return out


def build(group: TPGroup, case: Case, inputs: Inputs, variant: Variant) -> Decoder:
    model = Decoder(
        case.config,
        group=group,
        sequence_parallel=variant.sequence_parallel,
        reduce_dtype=variant.reduce_dtype,
        activation_checkpointing=variant.activation_checkpointing,
        loss_chunk=variant.loss_chunk,
        dtype=variant.dtype,
        seed=SEED,
    )
    scatter_state(model, inputs.state, group)
    return model


def gradients(model: nn.Module, group: TPGroup, config: ModelConfig) -> Results:
    return to_oracle(gather_state(model, group, gradients=True), config)


def updates(after: Results, before: Results) -> Results:
    each = {name: after[name].detach() - value for name, value in before.items()}
    return prefixed("update", each) | {"updates": torch.cat([each[name].flatten() for name in sorted(each)])}


def prefixed(prefix: str, values: Results) -> Results:
    return {f"{prefix}/{name}": value for name, value in values.items()}


def measure_decoder(group: TPGroup, case: Case, inputs: Inputs, variant: Variant) -> Results:
    model = build(group, case, inputs, variant)
    with variant.autocasting():
        results = {"logits": model(inputs.ids, step=0)}
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(STEPS):
        with variant.autocasting():
            loss = model(inputs.ids, inputs.labels, step=step, **case.loss_options)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            results |= {"loss": loss} | prefixed("grad", gradients(model, group, case.config))
            results |= {f"norm/{p}": grad_norm(model, group, p) for p in NORMS}
        clip_grad_norm_(model, MAX_NORM, group)
        optimizer.step()
    after, before = to_oracle(gather_state(model, group), case.config), to_oracle(inputs.state, case.config)
    return results | updates(after, before)


def measure_part(group: TPGroup, case: Case, inputs: Inputs, variant: Variant, kind: type[Block] | type[Stack]) -> Results:
    """A block or a stack alone: forward on x, backward of the cotangent."""
    options = {"activation_checkpointing": variant.activation_checkpointing} if kind is Stack else {}
    part = kind(
        case.config,
        group=group,
        sequence_parallel=variant.sequence_parallel,
        reduce_dtype=variant.reduce_dtype,
        dtype=variant.dtype,
        seed=SEED,
        **options,
    )
    scatter_state(part, part_of(inputs.state, "stack." if kind is Stack else "stack.blocks.0."), group)
    x, cotangent = inputs.x, inputs.cotangent
    counts = token_counts(case.batch * case.seq, group)
    context = Context.build(case.config, case.batch, case.seq, device=x.device, dtype=x.dtype, step=0)
    if variant.sequence_parallel:
        x, cotangent = (t.flatten(0, 1).split(counts)[group.rank] for t in (x, cotangent))
    x = x.detach().clone().requires_grad_()
    with variant.autocasting():
        out = part(x, context)
    out.backward(cotangent)
    assert x.grad is not None
    if variant.sequence_parallel:
        whole = inputs.x.shape
        out, dx = (collectives.all_gather(t.detach(), group, counts).view(whole) for t in (out, x.grad))
    else:
        dx = x.grad
    grads = prefixed("grad", gradients(part, group, case.config))
    return prefixed(kind.__name__.lower(), {"out": out, "dx": dx} | grads)


# --- the oracle


@functools.cache
def reference(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Results:
    """The oracle's results in float64, for inputs rounded to ``dtype``."""
    inputs = make_inputs(case, seed).to(dtype).to(torch.float64)
    weights = to_oracle(inputs.state, case.config)
    with torch.random.fork_rng(devices=[]):  # nn.Linear draws values that are overwritten at once
        decoder = OracleDecoder(oracle_config(case.config)).double()
    decoder.load_state_dict(weights)
    with_dropout(decoder, case, 0)
    results = {"logits": decoder(inputs.ids)}
    optimizer = torch.optim.AdamW(decoder.parameters(), **ADAMW)
    for step in range(STEPS):
        with_dropout(decoder, case, step)
        loss = decoder.loss(inputs.ids, inputs.labels, **case.loss_options)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            results |= {"loss": loss} | prefixed("grad", oracle_gradients(decoder))
            results |= {f"norm/{p}": torch.nn.utils.get_total_norm([p.grad for p in decoder.parameters()], p) for p in NORMS}
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), MAX_NORM)
        optimizer.step()
    results |= updates(dict(decoder.named_parameters()), weights)

    decoder.load_state_dict(weights)
    for name, part in (("block", decoder.stack.blocks[0]), ("stack", decoder.stack)):
        assert isinstance(part, OracleBlock | OracleStack)
        with_dropout(part, case, 0)
        part.zero_grad()
        x = inputs.x.clone().requires_grad_()
        out = part(x)
        out.backward(inputs.cotangent)
        results |= prefixed(name, {"out": out, "dx": x.grad} | prefixed("grad", oracle_gradients(part)))
    return {name: value.detach().clone() for name, value in results.items()}


def oracle_gradients(module: nn.Module) -> Results:
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def with_dropout(model: nn.Module, case: Case, step: int) -> None:
    """Gives the oracle's dropout sites the masks that ours are to have: one stream a site, indexed by global coordinates."""
    for name, block in model.named_modules():
        if isinstance(block, OracleBlock):
            at = f"{name}." if name else ""
            sites = {"1": f"{at}dropout_1", "2": f"{at}dropout_2", "attention": f"{at}attention.dropout"}
            keys = {site: rng.stream_key(SEED, path)[0] for site, path in sites.items()}
            block.dropout = functools.partial(masked, case.config, keys, step)


def masked(config: ModelConfig, keys: dict[str, int], step: int, site: str, x: Tensor) -> Tensor:
    p = config.attention_dropout if site == "attention" else config.dropout
    return x * rng.dropout(torch.ones_like(x), p, key=keys[site], step=step)


# --- their distance


FLOOR = 1e-3


@dataclass(frozen=True)
class Tolerance:
    """The largest relative distance of each kind of result. Kinds: the first word of a key, or ``grad`` inside a part."""

    default: float
    kinds: dict[str, float] = field(default_factory=dict)

    def of(self, key: str) -> float:
        return self.kinds.get(kind_of(key), self.default)


def kind_of(key: str) -> str:
    first, *rest = key.split("/")
    return (rest[0] if first in ("block", "stack") else first) if rest else first


EXACT = Tolerance(1e-10)
FLOAT32 = Tolerance(5e-6, {"update": 5e-3, "updates": 1e-4})
# AdamW divides a gradient by its size: where it is mostly rounding (a key bias), so is the update. All together must fit.
BFLOAT16 = Tolerance(0.03, {"loss": 5e-3, "grad": 0.08, "update": math.inf, "updates": 0.2})
TOLERANCES = {torch.float64: EXACT, torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


def distances(results: Results, expected: Results, config: ModelConfig) -> dict[str, float]:
    """For each key the norm of the difference, relative to the norm of what is expected (but never to less than FLOOR).

    Where exact arithmetic gives zero (see ``is_softmax_invariant``) the difference stands as it is.
    """
    assert results.keys() == expected.keys(), results.keys() ^ expected.keys()
    out = {}
    for key, value in expected.items():
        assert results[key].shape == value.shape, f"{key}: {tuple(results[key].shape)} for {tuple(value.shape)}"
        scale = 1.0 if is_softmax_invariant(key, config) else max(value.norm().item(), FLOOR)
        out[key] = (results[key].detach().double() - value).norm().item() / scale
    return out


def failures(results: Results, expected: Results, config: ModelConfig, tolerance: Tolerance) -> dict[str, float]:
    """The keys whose distance is above the tolerance (or nan), the worst first."""
    found = distances(results, expected, config)
    wrong = {key: d for key, d in found.items() if not d <= tolerance.of(key)}
    return dict(sorted(wrong.items(), key=lambda item: -item[1]))


def assert_equal(results: Results, expected: Results, config: ModelConfig, tolerance: Tolerance, where: str) -> None:
    wrong = failures(results, expected, config, tolerance)
    shown = ", ".join(f"{key} by {d:.2g} (allowed {tolerance.of(key):.2g})" for key, d in list(wrong.items())[:6])
    assert not wrong, f"{where}: {len(wrong)} of {len(expected)} results differ, the worst: {shown}"
