"""Model FLOPs utilization (MFU), on devices whose peak is known."""

import jax

PEAK_FLOPS = {
    "NVIDIA A10": 125e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA B100": 1750e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA B300 SXM6 AC": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA GB300": 2500e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 5090": 209e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,  # a chip is two devices
}
"""Peak dense bfloat16 FLOP/s of a device by `device_kind`, with float32 accumulation, from the
vendors' datasheets."""


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float | None, num_devices: int
) -> float | None:
    """Model FLOPs utilization (MFU): model FLOP/s divided by the peak of this number of devices;
    None if one is unknown."""
    peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
    if peak is None or flops_per_token is None:
        return None
    return tokens_per_second * flops_per_token / (peak * num_devices)


def without_peak() -> list[str]:
    """A warning if the devices are accelerators with an unknown peak."""
    device = jax.devices()[0]
    if device.platform == "cpu" or device.device_kind in PEAK_FLOPS:
        return []
    return [
        f"warning: mfu is not reported, since the peak FLOP/s of {device.device_kind} are unknown; "
        "add them to heinsen_jax.training.utilization.PEAK_FLOPS"
    ]
