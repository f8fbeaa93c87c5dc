"""DeepSpeed's ZeRO beside tensor parallelism: an engine whose numbers are those of a single device.

    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))         # rank = dp_rank * tp + tp_rank
    model = Decoder(config, group=TPGroup.from_mesh(mesh["tp"]))
    engine = initialize(model, mesh, {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}, optimizer)
    engine.backward(engine(ids, labels=labels))
    engine.step()

DeepSpeed treats this rank's shards as ordinary local tensors. It learns of the other tensor-parallel ranks by the ``mpu`` (which
group to broadcast and average over, and over which to add up gradient norms) and by one tag on each cut parameter (whether a
norm counts it on every rank or on the first alone). This module gives it both, replaces what it computes wrongly beside tensor
parallelism, and refuses what it would do wrongly in silence. docs/deepspeed.md lists these, with DeepSpeed's version.

The only module that imports DeepSpeed; nothing imports this one but who wants DeepSpeed. From then on DeepSpeed's engine refuses
a cut model without our ``mpu``, since it has no other place to notice one: ``DeepSpeedEngine.__init__`` is wrapped at the end.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.agreement import together
from parallel.gradients import check_replicas, clip_grad_norm_, grad_norm
from parallel.group import TPGroup
from parallel.layout import Layout
from parallel.regions import gather_pieces
from parallel.state import named_layouts
from tpblock import Block

WHOLE_MATRICES = ("muon", "lamb", "adafactor", "shampoo", "lars")
"""Optimizers whose update of one element depends on the whole parameter, by words in their names."""
SIZES_FILE = "tensor_parallel.json"
"""Beside DeepSpeed's files in a checkpoint: the sizes that it was saved at."""


@dataclass(frozen=True)
class ModelParallelUnit:
    """The six methods of DeepSpeed's ``mpu`` over a mesh with dimensions ("dp", "tp").

    None of its many optional methods: DeepSpeed takes the presence of some as a statement (``initialize_sequence_parallel``,
    ``get_slice_parallel_world_size``), and falls back to these six for the rest.
    """

    mesh: DeviceMesh

    def get_model_parallel_rank(self) -> int:
        return self.mesh.get_local_rank("tp")

    def get_model_parallel_world_size(self) -> int:
        return self.mesh["tp"].size()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group("tp")

    def get_data_parallel_rank(self) -> int:
        return self.mesh.get_local_rank("dp")

    def get_data_parallel_world_size(self) -> int:
        return self.mesh["dp"].size()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group("dp")


def mpu(mesh: DeviceMesh) -> ModelParallelUnit:
    """What ``deepspeed.initialize(mpu=...)`` asks for: who shares a copy of the model, and who has another.

    Raises:
        ValueError: if the mesh is not of dimensions ("dp", "tp") over all ranks, tensor-parallel ranks side by side.
    """
    if mesh.mesh_dim_names != ("dp", "tp"):
        raise ValueError(f'DeepSpeed needs a mesh with dimensions ("dp", "tp"), this one has {mesh.mesh_dim_names}')
    ranks, world = mesh.mesh.flatten().tolist(), dist.get_world_size()
    if ranks != list(range(world)):  # its barriers are over all ranks, its own meshes number them in this way
        raise ValueError(
            f"DeepSpeed needs a mesh of all {world} ranks with rank = dp * tp_size + tp, this one is {mesh.mesh.tolist()}"
        )
    return ModelParallelUnit(mesh)


def initialize(
    model: nn.Module,
    mesh: DeviceMesh | None,
    config: Mapping[str, Any] | str | Path,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
    *,
    model_parameters: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    training_data: torch.utils.data.Dataset[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> TensorParallelEngine:
    """``deepspeed.initialize`` for a model that is cut over the mesh's "tp" ranks.

    All ranks call it. The optimizer, scheduler and loader that DeepSpeed made are ``engine.optimizer``, ``engine.lr_scheduler``
    and ``engine.training_dataloader``.

    Args:
        model: with its layouts, its values set, on the device that it is to be trained on.
        mesh: all ranks, with dimensions ("dp", "tp"). None: the single device; torch.distributed is started if need be.
        config: DeepSpeed's, or the path of its JSON file. It is not changed. ``train_batch_size`` counts data-parallel replicas
            only; what is missing of the three batch sizes is filled in.
        optimizer: over ``model.parameters()``, or a function that makes one; None: the one that ``config`` names.
        model_parameters, lr_scheduler, training_data, collate_fn: as DeepSpeed's.

    Raises:
        ValueError: on every rank, before anything is communicated, if the config is not JSON, batch sizes do not fit, or it asks
            for what is wrong beside tensor parallelism; after one exchange, if the model's parameters do not fit the mesh.
    """
    device = next(model.parameters()).device
    _check_device(device)
    unit = mpu(_single_mesh(device) if mesh is None else mesh)
    settings = _as_json(config)
    _check_settings(settings, unit, optimizer)
    sizes = batch_sizes(settings, unit.get_data_parallel_world_size(), unit.get_model_parallel_world_size())
    settings |= sizes._asdict()
    if device.type == "cpu":
        # Its own Adam would be compiled at first use.
        named = settings.get("optimizer", {})
        if named.get("type", "").lower() in ("adam", "adamw") and not _zero(settings).get("offload_optimizer"):
            named.setdefault("params", {}).setdefault("torch_adam", True)
    index = device.index or 0
    os.environ.setdefault("LOCAL_RANK", str(index))  # it insists on it, and looks for MPI if it has to start the ranks itself
    engine, *_ = deepspeed.initialize(
        args=SimpleNamespace(device_rank=index),
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        lr_scheduler=lr_scheduler,
        training_data=training_data,
        collate_fn=collate_fn,
        mpu=unit,
        config=settings,
    )
    return engine


# -- settings


class BatchSizes(NamedTuple):
    """Sequences of an optimizer step over all replicas, those of one forward pass of one replica, and passes a step."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int


def batch_sizes(config: Mapping[str, Any], dp: int, tp: int) -> BatchSizes:
    """The three sizes, the missing ones from the others: total = micro x accumulation x data-parallel replicas.

    The tensor-parallel ranks of a replica share its batch and do not multiply it.
    """
    for name in BatchSizes._fields:
        if type(given := config.get(name)) not in (int, type(None)):
            raise ValueError(f"the DeepSpeed config's {name} must be a whole number, got {given!r}")
    total, micro, steps = (config.get(name) for name in BatchSizes._fields)  # type: Any, Any, Any
    if total is None and micro is None:
        raise ValueError("the DeepSpeed config needs train_batch_size or train_micro_batch_size_per_gpu")
    if total is None:
        steps = steps or 1
        total = micro * steps * dp
    elif micro is None:
        steps = steps or 1
        micro = total // (steps * dp)
    elif steps is None:
        steps = total // (micro * dp)
    if micro < 1 or steps < 1 or total != micro * steps * dp:
        raise ValueError(
            f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} x "
            f"{dp} data-parallel replicas (DP {dp}; the {tp} ranks of a tensor-parallel group, TP {tp}, share one batch)"
        )
    return BatchSizes(total, micro, steps)


def _as_json(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """A copy of the config as JSON holds it. DeepSpeed prints it as JSON on rank 0 alone, so that one it cannot print ends that
    rank and leaves the others waiting."""
    if isinstance(config, str | Path):
        return json.loads(Path(config).read_text())

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(inner, f"{path}.{key}" if path else str(key)) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [plain(inner, f"{path}[{i}]") for i, inner in enumerate(value)]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ValueError(f"the DeepSpeed config must be JSON: {path} is {value!r}, a {type(value).__name__}")

    return plain(config, "")


def _zero(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return settings.get("zero_optimization", {})


def _check_settings(settings: Mapping[str, Any], unit: ModelParallelUnit, optimizer: Any) -> None:
    """Refuses what DeepSpeed would accept and do wrongly beside tensor parallelism."""
    tp = unit.get_model_parallel_world_size()
    if tp == 1:
        return
    named = settings.get("optimizer", {}).get("type", "")
    _check_optimizer(type(optimizer).__name__ if isinstance(optimizer, torch.optim.Optimizer) else named, tp)
    wrong = {
        "tensor_parallel.autotp_size": (settings.get("tensor_parallel", {}).get("autotp_size", 0) > 1, "replaces the mpu"),
        "sequence_parallel_size": (settings.get("sequence_parallel_size", 1) > 1, "replaces the data-parallel groups"),
        "hybrid_engine": (settings.get("hybrid_engine", {}).get("enabled", False), "merges shards by its own rules"),
    }
    for key, off in (("zero_hpz_partition_size", 1), ("mics_shard_size", -1), ("zero_quantized_gradients", False)):
        groups = "makes groups of neighbouring ranks, which are tensor-parallel ones"
        wrong[f"zero_optimization.{key}"] = (_zero(settings).get(key, off) > off, groups)
    for key, (given, why) in wrong.items():
        if given:
            raise ValueError(f"the DeepSpeed config's {key} {why}: it does not work beside {tp} tensor-parallel ranks")


def _check_optimizer(name: str, tp: int) -> None:
    if tp > 1 and any(word in name.lower() for word in WHOLE_MATRICES):
        raise ValueError(
            f"{name} needs whole matrices, and each of the {tp} tensor-parallel ranks has a shard: "
            "use one that works element by element (SGD, Adam, AdamW)"
        )


def _check_device(device: torch.device) -> None:
    if device.type == "meta":
        raise ValueError("the model has no values yet, it is on the meta device: to_empty and initialise it, or load values")
    if (chosen := get_accelerator().device_name()) != device.type:
        raise ValueError(
            f"the model is on {device}, DeepSpeed has chosen {chosen}: set DS_ACCELERATOR={device.type} before it is imported"
        )


def _single_mesh(device: torch.device) -> DeviceMesh:
    """The mesh of one rank. DeepSpeed needs torch.distributed, and would start it through MPI."""
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (1, 1), mesh_dim_names=("dp", "tp"))


# -- the model


def _group_of(model: nn.Module, unit: ModelParallelUnit) -> TPGroup:
    """The tensor-parallel ranks, in invariant mode if the model is cut into virtual shards."""
    group = TPGroup.from_mesh(unit.mesh["tp"])
    virtual = {len(layout.parts[0].runs) for _, _, layout in named_layouts(model) if layout.owners is not None}
    return group.with_virtual_shards(max(virtual)) if virtual else group


def _check_model(model: nn.Module, group: TPGroup) -> None:
    """Checks on every rank or on none that the model is what its layouts say and is not partitioned yet."""
    assert dist.group.WORLD is not None
    everyone = TPGroup.from_process_group(dist.group.WORLD)
    with together(everyone, ValueError):
        _check_layouts(model, group)
    with together(everyone, ValueError):
        _check_uncut_shapes(model, group)
    with together(everyone, ValueError):
        try:
            check_replicas(model, group)
        except ValueError as error:
            raise ValueError(
                f"{error}; each rank's shard of a cut parameter needs a layout (see parallel.state.named_layouts)"
            ) from error


def _check_layouts(model: nn.Module, group: TPGroup) -> None:
    for name, parameter, layout in named_layouts(model):
        if hasattr(parameter, "ds_id"):
            raise ValueError(
                f"{name} is partitioned already: deepspeed.zero.Init cuts over all ranks, tensor-parallel ones included, "
                "whatever its mpu. Build the model without it; initialize partitions over the data-parallel ranks"
            )
        if layout.replicated:
            continue
        if len(layout.rank_shards) != group.size:
            raise ValueError(
                f"{name} is cut over {len(layout.rank_shards)} ranks, the mesh has {group.size} tensor-parallel ranks"
            )
        if tuple(parameter.shape) != (expected := layout.local_shape(group.rank)):
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)} on tensor-parallel rank {group.rank}, its layout says {expected}"
            )


def _check_uncut_shapes(model: nn.Module, group: TPGroup) -> None:
    """One exchange over the tensor-parallel ranks."""
    mine = {name: tuple(parameter.shape) for name, parameter, layout in named_layouts(model) if layout.replicated}
    shapes: list[dict[str, tuple[int, ...]]] = [mine] * group.size
    if group.size > 1:
        dist.all_gather_object(shapes, mine, group=group.process_group)
    for name, shape in shapes[0].items():
        for rank, other in enumerate(shapes):
            if other.get(name) != shape:
                raise ValueError(f"{name} has no layout, and its shape is {shape} on rank 0, {other.get(name)} on rank {rank}")


def _tag(model: nn.Module) -> None:
    """Marks each cut parameter. DeepSpeed's norms count a marked one on every tensor-parallel rank, others on the first."""
    for _, parameter, layout in named_layouts(model):
        if not layout.replicated:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def _use_whole_blocks(model: nn.Module) -> None:
    """ZeRO 3 gathers a module's parameters for its ``forward``, and those of other modules when it sees them read as attributes.
    Parallel blocks with two norms reach theirs by ``parameters()``: so it is to gather what is in a block as a whole."""
    for module in model.modules():
        if isinstance(module, Block):
            set_z3_leaf_module(module, True)


# -- the engine


class TensorParallelEngine(DeepSpeedEngine):
    """DeepSpeed's engine with the methods replaced that are wrong, or of one rank alone, beside tensor parallelism.

    Attributes:
        tp_group: the ranks that share a copy of the model.
    """

    tp_group: TPGroup

    def get_global_grad_norm(self) -> float | None:
        """The norm before clipping of all gradients of the last step, each counted once, under every stage and dtype.

        None before the first step, and where ``zero_optimization.compute_grad_norm`` is off.
        """
        norm = super().get_global_grad_norm()
        return None if norm is None else float(norm)

    def clip_fp32_gradients(self) -> None:
        """What it calls at stage 0 in float32: keeps the norm as well."""
        self._global_grad_norm = clip_grad_norm_(self.module, self.gradient_clipping(), self.tp_group)

    def _take_model_step(self, lr_kwargs: Any) -> None:
        half = self.fp16_enabled() or self.bfloat16_enabled()
        if not (half or self.zero_optimization() or self.gradient_clipping()):
            self._global_grad_norm = grad_norm(self.module, self.tp_group)
        super()._take_model_step(lr_kwargs)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """DeepSpeed's checkpoint, one file or more a rank, for the same number of ranks of each kind."""
        tag = str(tag or f"global_step{self.global_steps}")
        rank = self.local_rank if self.use_node_local_storage() else dist.get_rank()
        if rank == 0:
            folder = Path(save_dir, tag)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / SIZES_FILE).write_text(json.dumps(self._sizes(), indent=2))
        return super().save_checkpoint(str(save_dir), tag, dict(client_state or {}), save_latest, exclude_frozen_parameters)

    def load_checkpoint(self, load_dir: str | Path, tag: str | None = None, *args: Any, **options: Any) -> Any:
        """Continues from a checkpoint of :meth:`save_checkpoint` with the same bits. At stage 3 call it on a new engine.

        Raises:
            ValueError: if there is none, or it was saved at other sizes, stage or dtype.
        """
        if not self.load_universal_checkpoint():
            tag = tag or _latest(Path(load_dir))
            self._check_sizes(Path(load_dir, tag))
        path, client_state = super().load_checkpoint(str(load_dir), tag, *args, **options)
        if path is None:
            raise ValueError(f"DeepSpeed could not load the checkpoint {Path(load_dir, str(tag))}")
        return path, client_state

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the whole model's global tensors as one file. (DeepSpeed writes the first tensor-parallel rank's shards.)

        All ranks call it; rank 0 writes.
        """
        frozen = {name for name, parameter, _ in named_layouts(self.module) if not parameter.requires_grad}
        state = gather_state(self)
        if dist.get_rank() == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            kept = {name: t.cpu() for name, t in state.items() if not (exclude_frozen_parameters and name in frozen)}
            torch.save(kept, Path(save_dir, save_filename))
        dist.barrier()
        return True

    save_fp16_model = save_16bit_model

    def _sizes(self) -> dict[str, Any]:
        return {
            "tensor-parallel ranks": self.tp_group.size,
            "data-parallel replicas": self.dp_world_size,
            "ZeRO stage": int(self.zero_optimization_stage()),
            "dtype": str(self.get_data_types()[0]).removeprefix("torch."),
            "virtual shards": self.tp_group.virtual_shards,
        }

    def _check_sizes(self, folder: Path) -> None:
        try:
            saved = json.loads((folder / SIZES_FILE).read_text())
        except OSError as error:
            raise ValueError(f"{folder} is no checkpoint that an engine of launch.deepspeed saved") from error
        differences = [
            f"{key} {saved.get(key)}, now {value}" for key, value in self._sizes().items() if saved.get(key) != value
        ]
        if differences:
            raise ValueError(
                f"{folder} was saved with {'; '.join(differences)}, and DeepSpeed cannot convert it. To go on at other sizes, load "
                "it at its own, take launch.deepspeed.gather_state(engine), and give that to parallel.state.scatter_state(model, "
                "state, group) before initialize (weights without optimizer state)"
            )


def _latest(load_dir: Path) -> str:
    try:
        return (load_dir / "latest").read_text().strip()
    except OSError as error:
        raise ValueError(f"{load_dir} has no checkpoint: the file {load_dir / 'latest'} is missing") from error


def gather_state(engine: TensorParallelEngine) -> dict[str, Tensor]:
    """The global tensor of every parameter in the dtype that the model computes in, on every rank, under every stage.

    All ranks call it. For models that fit on one device; under stage 3 one parameter at a time is whole beside the result.
    """
    return {name: value.clone() for name, value in global_tensors(engine)}


def global_tensors(engine: TensorParallelEngine) -> Iterator[tuple[str, Tensor]]:
    """The same one at a time, each whole only while it is looked at."""
    for name, parameter, layout in named_layouts(engine.module):
        with _gathered(parameter), torch.no_grad():
            whole = Layout(tuple(parameter.shape)) if layout.replicated else layout
            yield name, gather_pieces(parameter.detach(), whole, engine.tp_group)


def _gathered(parameter: nn.Parameter) -> AbstractContextManager[object]:
    return deepspeed.zero.GatheredParameters(parameter) if hasattr(parameter, "ds_id") else nullcontext()


# -- gradient norms


class _SharedRows:
    """What several tensor-parallel ranks hold of some parameters (KV heads, when there are fewer of them than ranks).

    DeepSpeed's norm counts a tagged parameter on every rank. It is therefore given gradients in which the rows are zero that an
    earlier rank holds, too: what it adds up is then each row once.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.rank = rank
        self.layouts = {parameter: layout for _, parameter, layout in named_layouts(model) if layout.shared}

    def once(self, gradient: Tensor, parameter: nn.Parameter, start: int = 0) -> Tensor:
        """The elements of the flattened gradient from ``start`` on, repeated rows zeroed; itself if there are none.

        Elements beyond the parameter's are padding.
        """
        layout = self.layouts.get(parameter)
        if layout is None:
            return gradient
        assert layout.dim is not None
        shape, end = torch.Size(layout.local_shape(self.rank)), start + gradient.numel()
        flat = gradient.new_zeros(max(end, shape.numel()))
        flat[start:end] = gradient.flatten()
        whole, owned = flat[: shape.numel()].view(shape), set(layout.owned(self.rank))
        for piece in layout.pieces(self.rank):
            if piece not in owned:
                whole.narrow(layout.dim, piece.local, piece.length).zero_()
        return flat[start:end]


def _correct_norms(engine: TensorParallelEngine) -> None:
    """Has the optimizer that DeepSpeed made count every element of the gradient once, where it would not.

    Stages 1 to 3 are right but for shared rows. Without ZeRO, in half precision, the tags are lost (the unfused optimizer takes
    the norm of gradients, not of parameters), and ours is used. In float32 see ``clip_fp32_gradients``.
    """
    optimizer, shared = engine.optimizer, _SharedRows(engine.module, engine.tp_group.rank)
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        _use_our_norm(engine, optimizer)
    elif not shared.layouts:
        return
    elif isinstance(optimizer, BF16_Optimizer):
        _correct_bf16(optimizer, shared)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        _correct_stages_1_and_2(optimizer, shared)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        _correct_stage_3(optimizer, shared)


def _use_our_norm(engine: TensorParallelEngine, optimizer: Any) -> None:
    unscale_and_clip_grads = optimizer.unscale_and_clip_grads

    def with_our_norm(_: Any, apply_scale: bool = True) -> Any:
        scaled = float(grad_norm(engine.module, engine.tp_group))  # of gradients of the loss times the loss scale
        optimizer._global_grad_norm = scaled / optimizer.loss_scale_config.cur_scale
        return unscale_and_clip_grads(scaled, apply_scale)

    optimizer.unscale_and_clip_grads = with_our_norm


def _correct_bf16(optimizer: Any, shared: _SharedRows) -> None:
    get_grads_for_norm = optimizer.get_grads_for_norm

    def counted(for_clipping: bool = False) -> Any:
        if for_clipping:
            return get_grads_for_norm(for_clipping)
        gradients, experts = get_grads_for_norm()
        groups = zip(optimizer.fp32_groups_gradients, optimizer.bf16_groups, strict=True)
        of = {id(g): p for gs, ps in groups for g, p in zip(gs, ps, strict=True)}
        return [shared.once(gradient, of[id(gradient)]) for gradient in gradients], experts

    optimizer.get_grads_for_norm = counted


def _correct_stages_1_and_2(optimizer: Any, shared: _SharedRows) -> None:
    """A partition is a run of the flattened parameters: it may begin and end within one."""
    get_grad_norm_direct = optimizer.get_grad_norm_direct

    def counted(gradients: list[Tensor], params: list[nn.Parameter], norm_type: float = 2) -> Any:
        first = next(o for o, p in zip(optimizer.first_offset, optimizer.params_in_partition, strict=True) if p is params)
        pairs = _without_padding(gradients, params)
        once = [shared.once(g, p, first if i == 0 else 0) for i, (g, p) in enumerate(pairs)]
        return get_grad_norm_direct(once, params, norm_type)

    optimizer.get_grad_norm_direct = counted


def _without_padding(gradients: list[Tensor], params: list[nn.Parameter]) -> Iterator[tuple[Tensor, nn.Parameter]]:
    return zip((g for g in gradients if not getattr(g, "_zero_padding", False)), params, strict=False)


def _correct_stage_3(optimizer: Any, shared: _SharedRows) -> None:
    """Each parameter is flattened, padded and cut on its own."""
    get_grad_norm_direct = optimizer.get_grad_norm_direct

    def counted(gradients: list[Tensor], params: list[Any], norm_type: float = 2) -> Any:
        starts = [parameter.partition_numel() * optimizer._get_param_partition_rank(parameter) for parameter in params]
        once = [shared.once(g, p, start) for g, p, start in zip(gradients, params, starts, strict=True)]
        return get_grad_norm_direct(once, params, norm_type)

    optimizer.get_grad_norm_direct = counted


# -- the door


def _construct(original: Callable[..., None]) -> Callable[..., None]:
    """``DeepSpeedEngine.__init__`` for models that are cut: with our mpu it makes a :class:`TensorParallelEngine`, without one it
    would give all ranks the first one's shards, and refuses. Other models are none of its business."""

    @functools.wraps(original)
    def construct(self: Any, args: Any, model: nn.Module, *rest: Any, mpu: Any = None, **options: Any) -> None:
        if not isinstance(mpu, ModelParallelUnit):
            cut = {len(layout.rank_shards) for _, _, layout in named_layouts(model)} - {0, 1}
            if cut:
                raise ValueError(
                    f"the model is cut over {max(cut)} tensor-parallel ranks, and deepspeed.initialize was not told of them: it "
                    "would copy one rank's shards to the others. Call launch.deepspeed.initialize(model, mesh, config) instead, or "
                    "pass mpu=launch.deepspeed.mpu(mesh)"
                )
            return original(self, args, model, *rest, mpu=mpu, **options)
        group = _group_of(model, mpu)
        if type(self) is not DeepSpeedEngine:
            raise ValueError(f"a {type(self).__name__} does not work beside tensor parallelism, DeepSpeed's plain engine does")
        settings = options["config_class"]
        _check_settings(settings._param_dict, mpu, options.get("optimizer"))
        _check_model(model, group)
        zero = settings.zero_config
        if zero.offload_optimizer is not None and (shared := _SharedRows(model, group.rank).layouts):
            raise ValueError(
                f"offload_optimizer does not work where ranks share rows ({len(shared)} parameters with fewer KV heads than the "
                f"{group.size} tensor-parallel ranks): their gradient norm is taken before they can be counted once"
            )
        _tag(model)
        if zero.stage == 3:
            _use_whole_blocks(model)
        original(self, args, model, *rest, mpu=mpu, **options)
        self.__class__ = TensorParallelEngine
        self.tp_group = group
        _check_optimizer(type(self.basic_optimizer).__name__, group.size)  # what a function made is known only now
        if isinstance(self.optimizer, FP16_Optimizer) and _SharedRows(model, group.rank).layouts:
            raise ValueError(
                "the fused optimizer of ZeRO stage 0 counts rows that ranks share several times: set torch_adam in the config's "
                "optimizer, or use ZeRO stage 1"
            )
        _correct_norms(self)

    return construct


if get_accelerator().device_name() == "cpu":
    # Its shared-memory all-reduce, which training never uses, would be compiled when torch.distributed starts, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# Names of collectives that torch 2.13 has replaced and DeepSpeed 0.19 still uses: a line for each call of each rank.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
DeepSpeedEngine.__init__ = _construct(DeepSpeedEngine.__init__)
