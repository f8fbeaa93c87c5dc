"""Machines from published data sheets, for predictions about hardware that is not at hand. Figures are without sparsity.

A data sheet tells peaks. What of them is reached is assumed here, in the open, until benchmarks.calibrate has run on the machine:

=====================  =========================================================================================================
large matrix products  0.75 of the dense peak (``--matrix-efficiency``); products below 4096^3 less, see ``SATURATION``
memory                 0.85 of the bandwidth
attention              of the half of the square that the causal mask leaves: 0.35 of the peak on Hopper (FlashAttention-2 there, by
                       Shah et al., FlashAttention-3, 2024), taken for Blackwell, too; on Ampere 0.5 (Dao, FlashAttention-2, 2023:
                       0.5 to 0.73)
NVLink                 370 of 450 GB/s in a ring (a maintainer of NCCL in NVIDIA/nccl-tests issue 212); sums in the switch
                       (NVLink SHARP), which are faster, are left out
network                46 to 48 of 50 GB/s an adapter (NVIDIA/nccl-tests issue 290)
start and steps        8.4 us a collective and 3.4 us a step within a node, 14 us between nodes: ring, protocol Simple, in NCCL's
                       own model of its latencies (src/graph/tuning.cc)
overlap                0.8 of the shorter of a collective and a product that run at once
launches               5 us an operation; 25 of them forward, 50 backward and 10 in the optimizer a layer, without torch.compile;
                       twice as many for what is not in a layer
=====================  =========================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cost_model import Launch, Link, Machine, Speeds

SATURATION = ((256.0, 0.1), (512.0, 0.25), (1024.0, 0.5), (2048.0, 0.8), (4096.0, 1.0))
"""The share of the rate of large products that smaller ones reach: an assumption."""
MEMORY, NVLINK, NETWORK, OVERLAP = 0.85, 370 / 450, 47 / 50, 0.8
START, NODE_STEP, NETWORK_STEP, OPERATION = 8.4e-6, 3.4e-6, 14e-6, 5e-6


@dataclass(frozen=True)
class Sheet:
    """Published figures of a GPU in its usual server of eight: operations a second, bytes, and bytes a second, of NVLink and the
    network in one direction and for one GPU. ``sources``: for each figure the document, its address and what it says."""

    name: str
    bfloat16: float
    float32: float
    memory: float
    bandwidth: float
    nvlink: float
    network: float
    attention: float
    sources: dict[str, str]


def _sheet(name: str, document: str, system: str, attention: float, **figures: tuple[float, str]) -> Sheet:
    sources = {key: f"{system if key == 'network' else document}: {said}" for key, (_, said) in figures.items()}
    return Sheet(name, **{key: value for key, (value, _) in figures.items()}, attention=attention, sources=sources)


_CONNECTX_7 = (50e9, "8 ConnectX-7 of up to 400 Gb/s, one a GPU")
SHEETS = {
    "a100-80g": _sheet(
        "NVIDIA A100 80GB SXM",
        "NVIDIA A100 Tensor Core GPU data sheet, "
        "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
        "NVIDIA DGX A100 System user guide, https://docs.nvidia.com/dgx/dgxa100-user-guide/introduction-to-dgxa100.html",
        0.5,
        bfloat16=(312e12, "BFLOAT16 Tensor Core 312 TFLOPS, 624 with sparsity"),
        float32=(19.5e12, "FP32 19.5 TFLOPS"),
        memory=(80e9, "80 GB HBM2e"),
        bandwidth=(2.039e12, "2,039 GB/s"),
        nvlink=(300e9, "NVLink 600 GB/s, both directions together"),
        network=(25e9, "8 ConnectX-6 of up to 200 Gb/s, one a GPU"),
    ),
    "h100": _sheet(
        "NVIDIA H100 SXM",
        "NVIDIA H100 Tensor Core GPU, product specifications, https://www.nvidia.com/en-us/data-center/h100/",
        "NVIDIA DGX H100 user guide, https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html",
        0.35,
        bfloat16=(989e12, "BFLOAT16 Tensor Core 1,979 teraFLOPS with sparsity, half of that without"),
        float32=(67e12, "FP32 67 teraFLOPS"),
        memory=(80e9, "80GB"),
        bandwidth=(3.35e12, "3.35TB/s"),
        nvlink=(450e9, "NVLink 900GB/s, both directions together"),
        network=_CONNECTX_7,
    ),
    "h200": _sheet(
        "NVIDIA H200 SXM",
        "NVIDIA H200 Tensor Core GPU, specifications, https://www.nvidia.com/en-us/data-center/h200/",
        "NVIDIA DGX H100/H200 user guide, https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html",
        0.35,
        bfloat16=(989e12, "BFLOAT16 Tensor Core 1,979 TFLOPS with sparsity, half of that without"),
        float32=(67e12, "FP32 67 TFLOPS"),
        memory=(141e9, "141GB"),
        bandwidth=(4.8e12, "4.8TB/s"),
        nvlink=(450e9, "NVLink 900GB/s, both directions together"),
        network=_CONNECTX_7,
    ),
    "b200": _sheet(
        "NVIDIA B200 (HGX)",
        "NVIDIA HGX platform, specifications of HGX B200 (eight GPUs), https://www.nvidia.com/en-us/data-center/hgx/",
        "NVIDIA DGX B200, specifications, https://www.nvidia.com/en-us/data-center/dgx-b200/",
        0.35,
        bfloat16=(2.25e15, "FP16/BF16 Tensor Core 36 PFLOPS of eight with sparsity, half of that without"),
        float32=(75e12, "FP32 600 TFLOPS of eight"),
        memory=(180e9, "1.4TB of eight; 1,440GB in the DGX B200"),
        bandwidth=(8e12, "64TB/s of the eight in the DGX B200"),
        nvlink=(900e9, "NVLink 1.8TB/s a GPU, both directions together"),
        network=_CONNECTX_7,
    ),
}


def machine(name: str, matrix_efficiency: float = 0.75, devices_per_node: int = 8) -> Machine:
    """A data sheet with what is assumed of it. A ValueError lists those there are."""
    if name not in SHEETS:
        raise ValueError(f"unknown GPU {name!r}; there are {', '.join(SHEETS)}, and the JSON files of benchmarks.calibrate")
    if not 0 < matrix_efficiency <= 1:
        raise ValueError(f"the matrix efficiency is a share of the peak, above 0 and at most 1, got {matrix_efficiency}")
    sheet = SHEETS[name]
    peak = {"bfloat16": sheet.bfloat16, "float32": sheet.float32}
    speeds = Speeds(
        matrix={
            dtype: tuple((side, share * matrix_efficiency * rate) for side, share in SATURATION)
            for dtype, rate in peak.items()
        },
        attention={  # in operations of the whole square, of which half are left out
            f"{dtype} {way}": ((1.0, 2 * sheet.attention * rate),)
            for dtype, rate in peak.items()
            for way in ("forward", "backward")
        },
        memory={"any": ((1.0, MEMORY * sheet.bandwidth),)},
        launch={
            phase: Launch(layer=operations * OPERATION, rest=2 * operations * OPERATION)
            for phase, operations in (("forward", 25), ("backward", 50), ("optimizer", 10))
        },
        overlap=OVERLAP,
    )
    return Machine(
        name=sheet.name,
        sources=dict(sheet.sources),
        peak=peak,
        memory_bytes=sheet.memory,
        devices_per_node=devices_per_node,
        asynchronous=True,
        shared=False,
        speeds={1: speeds},
        node=Link(latency=NODE_STEP, bandwidth=NVLINK * sheet.nvlink, start=START),
        network=Link(latency=NETWORK_STEP, bandwidth=NETWORK * sheet.network, start=START),
    )
