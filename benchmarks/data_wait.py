"""How much of its time a trainer waits for data, with steps of a fixed length.

    python benchmarks/data_wait.py CACHE --step 0.5 --workers 4 --steps 200 [--device cuda] [--json F]

The trainer's own loop, loader and log run on samples of CACHE (AF3's weights); in place of the network stands
one whose step takes ``--step`` seconds by the clock and no CPU, as one on a GPU does. The trainer prints the
share of the time after the first step that it waited. Each batch is read and used, so that none is skipped.
What else the machine does counts: its load is printed, too.
"""

import argparse
import csv
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn

from megafold.pipeline.stream import CropConfig, MsaConfig, StreamConfig, TemplateConfig
from megafold.pipeline.stream.torch_dataset import StreamDataset, TorchCollate
from megafold.trainer.batches import BatchStream, TrainingData
from megafold.trainer.config import TrainConfig
from megafold.trainer.data_parallel import Ranks
from megafold.trainer.loop import Feed, Trainer


class OneNumber(nn.Module):
    """The least that an optimizer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(()))


class FixedLoss:
    """A loss that comes ``seconds`` after it was asked for."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def values(self) -> dict[str, Tensor]:
        return {"loss": self.total.detach()}


def fixed_step(seconds: float) -> Any:
    def loss_of(trainer: Trainer, batch: dict[str, Any], cycles: int) -> Any:
        ends = time.perf_counter() + seconds
        used = sum(float(value.sum()) for value in batch.values() if isinstance(value, Tensor))
        loss = (trainer.model.value**2).sum() + 0 * used
        time.sleep(max(0.0, ends - time.perf_counter()))
        return FixedLoss(loss)

    return loss_of


def waits_of(metrics: Path) -> list[float]:
    """Seconds that each step after the first waited, from the trainer's log."""
    with metrics.open() as file:
        rows = list(csv.DictReader(file))[1:]
    return [float(row["data_wait"]) * float(row["step_s"]) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--step", type=float, default=0.5, help="seconds a step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--msa-rows", type=int, default=1024)
    parser.add_argument("--templates", type=int, default=4)
    parser.add_argument("--device", default="cpu", help="with cuda, batches lie in pinned memory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    stream = StreamConfig(
        crop=CropConfig(tokens=args.tokens, atoms=12 * args.tokens + 24),
        msa=MsaConfig(rows=args.msa_rows),
        template=TemplateConfig(count=args.templates),
    )
    config = TrainConfig.for_preset(
        "tiny",
        steps=args.steps,
        num_workers=args.workers,
        device=args.device,
        log_every=max(1, args.steps // 10),
    )
    data = TrainingData(dataset=StreamDataset(args.cache, stream), collate=TorchCollate())
    with tempfile.TemporaryDirectory() as folder:
        batches = BatchStream(data, config, Ranks())
        try:
            feed = Feed(batches=batches, sampler=batches)
            Trainer(OneNumber(), config, feed, Path(folder), loss_of=fixed_step(args.step)).run()
        finally:
            batches.close()
        waits = waits_of(Path(folder) / "metrics.csv")
    busy = load, os.getloadavg()[0]
    print(f"Load of the machine ({os.cpu_count()} cores): {busy[0]:.1f} before, {busy[1]:.1f} after")
    if args.json:
        result = {
            "share": sum(waits) / (len(waits) * args.step),
            "p50_ms": 1e3 * statistics.median(waits),
            "longest_ms": 1e3 * max(waits),
            "load": busy,
            "cores": os.cpu_count(),
            "settings": {name: str(value) for name, value in vars(args).items()},
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
