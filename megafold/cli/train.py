"""``megafold train``: the bundled trainer on a cache."""

import atexit
import json
import os
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from megafold.cli.locations import CacheLocation
from megafold.cli.stream_options import stream_options, stream_settings
from megafold.pipeline.errors import InputError


@click.command(name="train")
@click.argument("cache", type=CacheLocation())
@click.option("--preset", default="tiny", show_default=True, help="Sizes of the network: tiny, small, af3.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("runs/train"), show_default=True
)
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --out, if it has one.")
@click.option("--allow-other-data", is_flag=True, help="Resume although the cache's snapshot is another.")
@click.option("--steps", type=click.IntRange(0), help="Optimizer steps in all.")
@click.option(
    "--sp", type=click.IntRange(1), help="Ranks that share one sample, for longer crops; under torchrun."
)
@click.option("--entry", "entries", multiple=True, help="Train on this entry alone; repeatable.")
@stream_options
@click.option(
    "--no-augment",
    is_flag=True,
    help="Leave conformers and coordinates of a sample unturned: to learn one entry by heart sooner.",
)
@click.option("--epoch-size", type=click.IntRange(1), help="Samples an epoch; default: one an entry.")
@click.option(
    "--where",
    default="",
    metavar="EXPRESSION",
    help='Train on entries for which it is true, such as "resolution < 4 AND has_msa".',
)
@click.option(
    "--stream",
    "stream_file",
    type=click.Path(path_type=Path),
    help="JSON file of stream settings, on top of those of the options: splits, further caches, ….",
)
@click.option("--workers", type=click.IntRange(0), help="Processes that load data; 0: the trainer's own.")
@click.option("--backend", type=click.Choice(["eager", "compile", "triton"]))
@click.option("--device", help="auto, cpu, cuda, cuda:1, …")
@click.option("--precision", type=click.Choice(["bf16", "fp32"]))
@click.option("--sample-structures", type=click.IntRange(0), help="Structures to predict at the end.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Any other training setting; repeatable."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(
    cache: Path | str,
    preset: str,
    out: Path,
    resume: bool,
    allow_other_data: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Train a model on CACHE.

    Ctrl-C ends the run after the step in hand, with a checkpoint; --resume goes on exactly there. Under
    torchrun each rank takes its share of every epoch; with --sp P, each P ranks do. Ranks that
    torchrun --max-restarts has started again go on from the newest checkpoint.
    """
    # OpenMP's threads spin for long while they wait, which makes a step many times slower as soon as
    # anything else runs on the same cores (loader processes do). It is read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    try:
        from megafold.trainer.train import Resume, run_training
    except ImportError as error:
        raise InputError(
            f"training needs torch ({error}): pip install 'megafold[train]'", reason="no-torch"
        ) from error

    config = _config(preset, values)
    data = _data(cache, values, config)
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    chosen = Resume(allow_other_data=allow_other_data) if resume or restarted else None
    # With --json, standard output is the summary alone.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        summary = run_training(config, data, out, resume=chosen)
    if failed := data.dataset.failures.report():
        click.echo(failed, err=True)
    if os.environ.get("RANK", "0") == "0":  # the first rank tells
        _tell(summary, out, as_json=as_json)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        _leave()


def _tell(summary: Any, out: Path, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(summary.to_dict(), indent=1))
        return
    click.echo(f"{summary.steps} steps in {summary.minutes:.1f} min, loss {summary.loss:.3f}: {out}")
    for structure in summary.structures:
        best = max(structure.lddt)
        expected = f", expected {max(structure.plddt):.3f}" if structure.plddt else ""
        click.echo(
            f"{structure.entry}: lDDT {best:.3f} (best of {len(structure.lddt)}{expected}), "
            f"RMSD {min(structure.rmsd):.2f} Å: {structure.path}"
        )


def _leave() -> None:
    """End a rank's process without the interpreter's own end.

    Threads of PyTorch's process groups at times abort there, and torchrun then calls a run that is complete a
    failure.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _config(preset: str, values: dict[str, Any]) -> Any:
    from megafold.trainer.config import TrainConfig

    named = {
        "steps": values["steps"],
        "sp": values["sp"],
        "num_workers": values["workers"],
        "device": values["device"],
        "backend": values["backend"],
        "precision": values["precision"],
        "seed": values["seed"],
        "sample_count": values["sample_structures"],
    }
    changes = {name: value for name, value in named.items() if value is not None}
    known = {item.name: item for item in fields(TrainConfig)}
    for text in values["settings"]:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise click.UsageError(f"--set {text}: give NAME=VALUE, NAME one of {', '.join(sorted(known))}")
        changes[name] = _typed(name, value, type(known[name].default))
    return TrainConfig.for_preset(preset, **changes)


def _typed(name: str, text: str, kind: type) -> Any:
    try:
        return _truth(text) if kind is bool else kind(text)
    except ValueError as error:
        raise click.UsageError(f"--set {name}={text}: {error}") from error


def _truth(text: str) -> bool:
    meanings = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in meanings:
        raise ValueError(f"give one of {', '.join(meanings)}")
    return meanings[text.lower()]


def _data(cache: Path | str, values: dict[str, Any], config: Any) -> Any:
    import torch

    from megafold.pipeline.stream import PadSizes, open_stream
    from megafold.pipeline.stream.mixture import merged_settings
    from megafold.pipeline.stream.torch_dataset import StreamDataset, TorchCollate
    from megafold.trainer.batches import TrainingData

    entries = [entry.lower() for entry in values["entries"]]
    own: dict[str, Any] = {
        "msa": {"recycles": config.n_cycles if config.redraw_msa else 1},
        "augment": not values["no_augment"],
        "symmetry": config.rollout_steps > 0 or config.sample_count > 0,
        "sampling": {
            "weights": "uniform" if entries else "af3",
            "entries": entries,
            "where": values["where"],
            "epoch_size": values["epoch_size"],
        },
    }
    settings = merged_settings(stream_settings(values), own)
    stream = open_stream(cache, merged_settings(settings, _stream_settings(values["stream_file"])))
    dataset = StreamDataset(stream)
    identity = json.loads(json.dumps(stream.identity()))
    sizes = PadSizes()
    if torch.cuda.is_available() and values["device"] != "cpu":
        # One shape for all batches: kernels are compiled, and memory is laid out, once. A CPU would only
        # compute the padding.
        sizes = PadSizes(
            tokens=max(config.crop.tokens for config in stream.configs),
            atoms=max(config.crop.atoms for config in stream.configs),
            msa=max(config.msa.rows for config in stream.configs),
            templates=max(config.template.count for config in stream.configs),
        )
    return TrainingData(dataset=dataset, collate=TorchCollate(sizes, meta=True), identity=identity)


def _stream_settings(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: not a JSON file of stream settings: {error}", reason="stream-setting"
        ) from error
    if not isinstance(settings, dict):
        raise InputError(f"{path}: stream settings are an object", reason="stream-setting")
    return settings
