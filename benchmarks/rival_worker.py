"""A process that makes training samples with AtomWorks, in an environment of its own.

``benchmarks/rival.py`` starts it and asks it by lines of JSON: requests on standard input, answers on the
descriptor that the command line names. Nothing of MegaFold is imported here, so that neither slows the other.

A request is ``{"path", "tokens", "seed"}``; its answer has the seconds of parsing and of the AF3 transforms
(wall and CPU, processes that it starts included), the tokens of the sample, and the error where there was
one. The first answer says which versions are installed.
"""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from atomworks.io.config import ParseConfig
from atomworks.io.parser import parse
from atomworks.ml.pipelines.af3 import build_af3_transform_pipeline

#: Its preset for PDB files. One model and one assembly, since that is what a sample is made of.
CONFIG = ParseConfig.from_preset("rcsb", model=1, build_assembly="first")
PIPELINES: dict[int, Any] = {}


def pipeline(tokens: int) -> Any:
    if tokens not in PIPELINES:
        PIPELINES[tokens] = build_af3_transform_pipeline(
            is_inference=False, protein_msa_dirs=[], rna_msa_dirs=[], crop_size=tokens
        )
    return PIPELINES[tokens]


def clocks() -> tuple[float, float]:
    return time.perf_counter(), sum(os.times()[:4])


def sample(path: str, tokens: int, seed: int) -> dict[str, Any]:
    """What its data sets do with a row: parse the file, take the assembly, run the transforms."""
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    transforms = pipeline(tokens)
    started = clocks()
    parsed = parse(path, config=CONFIG)
    parsed_at = clocks()
    (assembly, stack), *_ = parsed["assemblies"].items()
    name = Path(path).name
    made = transforms(
        {
            "example_id": name,
            "path": path,
            "pdb_id": name.split(".")[0],
            "assembly_id": assembly,
            "extra_info": {},
            "atom_array": stack[0],
            "atom_array_stack": stack,
            **{key: parsed[key] for key in ("chain_info", "ligand_info", "metadata")},
        }
    )
    ended = clocks()
    return {
        "parse_s": parsed_at[0] - started[0],
        "transforms_s": ended[0] - parsed_at[0],
        "parse_cpu_s": parsed_at[1] - started[1],
        "transforms_cpu_s": ended[1] - parsed_at[1],
        "tokens": len(made["feats"]["restype"]),
    }


def main() -> None:
    torch.set_num_threads(1)
    with os.fdopen(int(sys.argv[1]), "w") as answers:

        def answer(message: dict[str, Any]) -> None:
            print(json.dumps(message), file=answers, flush=True)

        answer({name: version(name) for name in ("atomworks", "torch", "rdkit", "biotite", "numpy")})
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer(sample(request["path"], request["tokens"], request["seed"]))
            except Exception as error:  # whatever it is, it cost this entry its sample
                answer({"error": f"{type(error).__name__}: {error}"[:300]})


if __name__ == "__main__":
    main()
