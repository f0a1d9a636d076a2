"""Memory and smallest batch of the 2025 handout's XXL model on TPU v5p, with FSDP and TP."""

from typing import Any

import pandas as pd

from cs336_systems.analysis import xxl
from cs336_systems.book.frames import digits
from cs336_systems.experiments import Calculation, Lines, Listing, problem

TOKENS = (0, 512, 1024, 2048, 4096, 8192)
LIMIT_GB = xxl.V5P_BYTES / 1e9
DEVICES = (32, 38, 48, 64, 96, 128, 192, 256)


def fits_claim(rows: pd.DataFrame) -> str:
    """Return from how many devices on XXL fits without activations."""
    fewest = rows.loc[(rows["tokens"] == 0) & (rows["gigabytes"] <= LIMIT_GB), "devices"].min()
    return (
        f"Without activations XXL fits a TPU v5p from N_FSDP = {fewest} on, with each token later"
    )


@problem()
class CommunicationAccounting(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        """Return XXL's memory by tokens saved, and a device's share of it by number of devices."""
        rows: list[dict[str, Any]] = []
        for tokens in TOKENS:
            saved = xxl.saved_bytes(xxl.XXL, tokens)
            fewest = xxl.fewest_devices(xxl.XXL, tokens)
            rows.append(
                {
                    "quantity": "fewest",
                    "tokens": tokens,
                    "saved for backward (GB)": saved / 1e9,
                    "H100s (80 GB)": (xxl.fixed_bytes(xxl.XXL) + saved) / xxl.H100_BYTES,
                    "fewest N_FSDP (95 GB)": fewest,
                    "GB a device there": xxl.bytes_per_device(xxl.XXL, tokens, fewest) / 1e9,
                }
            )
            rows += [
                {
                    "quantity": "memory",
                    "tokens": tokens,
                    "batch": f"{tokens:,} tokens",
                    "devices": devices,
                    "gigabytes": xxl.bytes_per_device(xxl.XXL, tokens, devices) / 1e9,
                }
                for devices in DEVICES
            ]
        return rows

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """Return the numbers of the text: XXL's sizes, devices and smallest batches.

        A batch is given for collectives of FSDP and TP that overlap each other, and that do not.
        """
        # Smallest batches per device with overlap ("tokens", "batch") and without ("shared_...").
        model, mesh = xxl.XXL, xxl.V5P
        a_token = xxl.saved_bytes(model, 1)
        alone, shared = (
            xxl.smallest_batch_per_device(model, mesh, overlap=overlap) for overlap in (True, False)
        )
        found = {
            "billions": model.parameters / 1e9,
            "fixed_terabytes": xxl.fixed_bytes(model) / 1e12,
            "h100s": xxl.fixed_bytes(model) / xxl.H100_BYTES,
            "megabytes_a_token": a_token / 1e6,
            "half_a_token": a_token / 2e6,
            "fewest": xxl.fewest_devices(model, 0),
            "most_tokens": xxl.V5P_BYTES // (a_token / 2),
            "alpha": mesh.flops_per_s / mesh.link_bytes_per_s,
            "tokens": alone,
            "batch": alone * mesh.devices,
            "shared_tokens": shared,
            "shared_batch": shared * mesh.devices,
        }
        return {
            name: str(value)
            if isinstance(value, int)
            else digits(value, 5 if value >= 10_000 else 4)
            for name, value in found.items()
        }

    tables = {
        "memory": Listing(
            title="XXL's memory by the tokens whose activations it saves",
            where={"quantity": "fewest"},
            significant=4,
            columns=(
                "tokens",
                "saved for backward (GB)",
                "H100s (80 GB)",
                "fewest N_FSDP (95 GB)",
                "GB a device there",
            ),
        )
    }
    figures = {
        "memory": Lines(
            claim=fits_claim,
            title="Memory of XXL on a TPU v5p",
            subtitle="calculated: float32 weights, gradients and moments, bfloat16 activations",
            bound=(LIMIT_GB, f"a TPU v5p has {LIMIT_GB:.0f} GB"),
            x="devices",
            x_title="N_FSDP",
            y="gigabytes",
            y_title="GB a device",
            color="batch",
            where={"quantity": "memory"},
        )
    }
