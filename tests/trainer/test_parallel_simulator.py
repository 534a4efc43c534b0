"""The simulator: the shape that the paper reports, counted bytes, files that are wrong."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

from megafold.cli.main import group
from megafold.trainer.errors import ConfigError
from megafold.trainer.parallel import schemes
from megafold.trainer.parallel.simulator import (
    Memory,
    Network,
    Operator,
    Phase,
    block_bytes,
    bundled,
    longest,
    project,
    read_inputs,
    smallest_sp,
)
from tests.trainer.test_data_parallel import ROOT
from tests.trainer.test_parallel_cost import C_S, C_Z, N_HEAD, table_of_a_block


@pytest.fixture(scope="module")
def h200():
    return read_inputs(bundled()["h200"])


def test_the_shape_of_the_paper():
    """1.35 times longer on one GPU, and 3.36 times on 32, than PyTorch's 590 tokens. 1.35 is an input."""
    inputs = read_inputs(bundled()["paper"])
    assert inputs.baseline_length == 590
    times = {gpus: longest(inputs.memory, gpus)[0] / 590 for gpus in (1, 2, 4, 8, 16, 32, 64, 1024)}
    assert times[1] == pytest.approx(1.35, abs=0.01)
    assert times[32] == pytest.approx(3.36, rel=0.03)
    assert list(times.values()) == sorted(times.values())
    # Were all memory shared, 32 GPUs would reach 1.35 · √32 = 7.6; what is not shared bounds it.
    assert times[1024] < 1.35 * (215_800 / 27_396) ** 0.5


@pytest.fixture(scope="module")
def counted():
    """Bytes a pair of each part of the network, in float32 and in bfloat16, as the benchmark counts them."""
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    run = [sys.executable, "-c", code, str(ROOT / "benchmarks/saved_bytes.py")]
    lines = subprocess.run(run, check=True, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    return {line[:32].strip(): tuple(map(float, line[32:].split())) for line in lines[1:]}


def test_the_bytes_of_the_paper_are_those_that_its_sources_give(counted):
    """The sum from reported lengths and sizes; what is not shared from what is counted in our network."""
    memory = read_inputs(bundled()["paper"]).memory
    phase = memory.phases["step"]
    reported = (141e9 - 4.08e9) / (1.35 * 590) ** 2
    assert phase.shared_bytes + phase.unshared_bytes == pytest.approx(reported, rel=1e-3)
    blocks, _ = counted["diffusion: 24 blocks"]
    assert phase.unshared_bytes == pytest.approx(
        counted["diffusion: conditioning of z"][0] + blocks, rel=1e-3
    )
    # A norm's result and a bias for 16 heads in each of the blocks, their statistics, and z.
    assert blocks == pytest.approx(24 * (128 + 16 + 2) * 4 + 128 * 4, rel=0.01)


def test_our_bytes_are_the_counted_ones(counted, h200):
    """What is kept when the diffusion module's backward pass begins, in bfloat16."""
    bfloat16 = {name: low for name, (_, low) in counted.items()}
    z = 2 * 128
    kept = (
        (48 + 4 + 4) * bfloat16["Pairformer block, recomputed"]
        + 2 * 4 * 2 * 64  # inputs of the template's blocks
        + bfloat16["diffusion: conditioning of z"]
        + (z + bfloat16["distogram"])
        + bfloat16["confidence: without its blocks"]
    )
    assert h200.memory.phases["diffusion"].shared_bytes == pytest.approx(kept, rel=1e-3)
    # Logits of 64 bins, and what a softmax in float32 keeps of each, for both kinds of errors.
    assert bfloat16["confidence: without PAE's loss"] < bfloat16["confidence: without its blocks"] - 4 * 64


SIZES = Network(c_z=C_Z, c_triangle=16, n_head=N_HEAD, c_s=C_S)


@pytest.mark.parametrize("p", [2, 4])
def test_our_scheme_sends_what_is_counted(p):
    counted = block_bytes(SIZES, 8, p)["forward"]
    single = counted.pop("single")
    assert schemes.sent("rotating", SIZES, 8, p) * 2 == pytest.approx(sum(counted.values()))
    assert single > 0


def test_other_schemes_send_what_their_tensors_say():
    """By listing who sends what to whom, of matrices of one number each."""
    n, p = 8, 4
    network = Network(c_z=1, c_triangle=1, n_head=1)
    rows = n // p
    # Rows of an operand of both multiplications, of z, and of both biases go to all others.
    assert schemes.sent("gathering", network, n, p) == 5 * rows * n * (p - 1)
    side = 2
    tile = (n // side) ** 2
    bias = (n // side) * n  # a row of tiles, which each rank of another row lacks in one column
    panels = 8 * tile * (side - 1)
    biases = 2 * bias * (side - 1)
    assert schemes.sent("tiles", network, n, p) == panels + biases
    with pytest.raises(ConfigError, match="8 ranks make no square"):
        schemes.sent("tiles", network, n, 8)


def test_our_scheme_sends_less_with_every_rank_and_the_gathering_one_more(h200):
    ranks = [4, 16, 64, 256, 1024]
    bytes_of = {
        scheme: [schemes.sent(scheme, h200.network, 4096, p) for p in ranks] for scheme in schemes.SCHEMES
    }
    assert bytes_of["rotating"] == sorted(bytes_of["rotating"], reverse=True)
    assert bytes_of["gathering"] == sorted(bytes_of["gathering"])
    assert all(a < b for a, b in zip(bytes_of["rotating"], bytes_of["tiles"], strict=True))
    for p in ranks:
        lengths = {scheme: schemes.longest(scheme, h200, p) for scheme in schemes.SCHEMES}
        assert lengths["rotating"] > lengths["gathering"]
        assert schemes.transfers_s("rotating", h200, 4096, p) < schemes.transfers_s(
            "gathering", h200, 4096, p
        )


@pytest.mark.parametrize("p", [2, 4])
def test_bytes_of_a_block_are_the_counted_ones(p):
    """In bfloat16 with sums in float32, as the table that counted collectives are held to."""
    network = SIZES
    table = table_of_a_block(p, 8, 2)
    expected = {
        direction: sum(sent for (_, backward), (_, sent) in table.items() if backward == is_backward)
        for direction, is_backward in (("forward", False), ("backward", True))
    }
    found = {direction: round(sum(uses.values())) for direction, uses in block_bytes(network, 8, p).items()}
    assert found == expected
    assert block_bytes(network, 8, 1) == {"forward": {}, "backward": {}}


def test_times_go_through_what_was_measured():
    cubic = Operator(
        source="",
        per_block=1,
        lengths=(100, 200, 400),
        forward_ms=(1.0, 8.0, 64.0),
        both_ms=(4.0, 16.0, 64.0),
    )
    assert cubic.forward_at(800) == pytest.approx(512)
    assert cubic.both_at(800) == pytest.approx(256)  # quadratic


def test_memory_is_that_of_the_phase_that_needs_most():
    gib = 2**30
    phases = {
        "shared": Phase(source="", shared_bytes=gib / 100, unshared_bytes=0),
        "whole": Phase(source="", shared_bytes=0, unshared_bytes=gib / 400),
    }
    memory = Memory(gpu_gib=110, fixed_gib=10, phases=phases)
    assert memory.longest(1) == 100
    assert memory.longest(4) == 200
    assert memory.longest(16) == 192  # 200 is no multiple of 16
    assert memory.needed(100, 1) == pytest.approx(110)


def without(inputs, **parts):
    return replace(inputs, network=replace(inputs.network, **parts))


def test_a_step_on_more_gpus(h200):
    h200 = without(h200, rollout_steps=0)  # which all ranks do alike
    alone = project(h200, gpus=1, sp=1, tokens=768)
    assert alone.exposed_s == alone.sent_gib == 0
    shared = {sp: project(h200, gpus=sp, sp=sp, tokens=768) for sp in (2, 4, 8, 16, 64)}
    for sp, step in shared.items():
        # Computation is shared but for what all ranks do; transfers are not free, most of all between nodes.
        assert alone.compute_s / sp <= step.compute_s < 1.1 * alone.compute_s / sp + 0.1
        assert step.exposed_s > 0
        assert step.memory_gib < alone.memory_gib
    assert shared[16].exposed_s > 1.5 * shared[8].exposed_s
    groups = project(h200, gpus=64, sp=4, tokens=768)
    assert groups.samples_per_s == pytest.approx(16 / groups.step_s)
    links = replace(h200.links, latency_us=0.0, within_node_gb_s=1e6, between_nodes_gb_s=1e6)
    faster = replace(h200, links=links)
    assert project(faster, gpus=8, sp=8, tokens=768).exposed_s < 0.01 * shared[8].exposed_s


@pytest.mark.parametrize(("n", "measured_s"), [(384, 0.733), (768, 2.408), (1024, 4.466)])
def test_a_step_on_one_gpu_is_near_the_measured_one(h200, n, measured_s):
    """``benchmarks/training_step.py``: one cycle; the projection leaves out losses and the optimizer."""
    step = project(without(h200, mean_cycles=1), gpus=1, sp=1, tokens=n)
    assert 0.8 * measured_s < step.compute_s < measured_s


@pytest.mark.parametrize("sp", [1, 4])
def test_the_confidence_head_and_its_rollout_take_their_time(h200, sp):
    n = 768
    whole = project(h200, gpus=sp, sp=sp, tokens=n)
    blind = project(without(h200, n_confidence=0), gpus=sp, sp=sp, tokens=n)
    both = sum(op.per_block * (op.forward_at(n) + op.both_at(n)) for op in h200.operators.values())
    assert whole.compute_s - blind.compute_s == pytest.approx(4 * both / sp / 1e3)
    block = {way: sum(uses.values()) for way, uses in block_bytes(h200.network, n, sp).items()}
    # Logits of 64 bins go to their transposed places, and their gradient back: a rank keeps its own tile.
    logits = 2 * 2 * 64 * (n / sp) ** 2 * (sp - 1)
    sent = 4 * (2 * block.get("forward", 0) + block.get("backward", 0)) + logits
    assert whole.sent_gib - blind.sent_gib == pytest.approx(sent / 2**30)
    still = project(without(h200, rollout_steps=0), gpus=sp, sp=sp, tokens=n)
    # 20 passes of one copy, forward alone, as measured at this length.
    assert whole.compute_s - still.compute_s == pytest.approx(20 * 7.65 / 1e3, rel=0.02)
    z = 2 * 128 * n**2 * (sp - 1) / sp
    assert whole.sent_gib - still.sent_gib == pytest.approx(z / 2**30)
    assert (whole.exposed_s > blind.exposed_s) == (whole.exposed_s > still.exposed_s) == (sp > 1)


def test_the_smallest_group_that_holds_a_sample(h200):
    longest = h200.memory.longest(4)
    assert smallest_sp(h200, longest, 1024) == 4
    assert smallest_sp(h200, longest + 4, 1024) == 8
    assert smallest_sp(h200, longest + 4, 4) is None


def test_wrong_groups_and_missing_times_are_refused(h200):
    with pytest.raises(ConfigError, match="does not divide 6"):
        project(h200, gpus=6, sp=4, tokens=100)
    with pytest.raises(ConfigError, match="no times can be projected"):
        project(read_inputs(bundled()["paper"]), gpus=4, sp=4, tokens=100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("memory"), r"in\.json: memory is missing; it takes name"),
        (lambda v: v.update(memory=3), r"in\.json: memory: give an object, not 3"),
        (lambda v: v["memory"].update(gpu_gib="lots"), "memory: gpu_gib is 'lots': give a number"),
        (lambda v: v["memory"]["phases"].update(trunk=[1]), r"memory\.phases\.trunk: give an object"),
        (lambda v: v["operators"]["transition"].update(lengths=384), "operators.transition: give positive"),
        (lambda v: v["operators"]["transition"].update(both_ms=["1", "2"]), "transition: give positive"),
        (lambda v: v["memory"].pop("gpu_gib"), r"in\.json: memory.*gpu_gib"),
        (lambda v: v["memory"].update(phases={}), "memory.phases: give one"),
        (lambda v: v["links"].update(colour="red"), r"in\.json: links.*colour"),
        (lambda v: v["operators"]["transition"].update(lengths=[384]), "operators.transition: give positive"),
        (lambda v: v["diffusion"].update(copies_ms=[1.0]), "diffusion: give positive copies_ms and"),
        (lambda v: v.update(gpus=3), "gpus"),
    ],
)
def test_wrong_files_are_named(tmp_path, change, message):
    values = json.loads(bundled()["h200"].read_text())
    change(values)
    path = tmp_path / "in.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message):
        read_inputs(path)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_files_that_are_no_inputs_are_named(tmp_path, text):
    path = tmp_path / "in.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"in\.json"):
        read_inputs(path)


ARGUMENTS = ["simulate", "--tokens", "4000", "--gpus", "2"]


def test_the_command_prints_both_tables():
    result = CliRunner().invoke(group, [*ARGUMENTS, "--gpus", "8", "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.output)
    assert [row["sp"] for row in printed["longest"]] == [2, 8]
    assert printed["longest"][1]["times_longer"] > printed["longest"][0]["times_longer"] > 1
    assert printed["steps"][0] == {"gpus": 2, "sp": None, "tokens": 4000, "step_s": None}
    assert printed["steps"][1]["samples_per_s"] > 0
    text = CliRunner().invoke(group, ARGUMENTS).output
    assert "does not fit" in text


def test_the_command_compares_schemes_and_draws_them(tmp_path):
    picture = tmp_path / "schemes.png"
    arguments = ["simulate", "--gpus", "1", "--gpus", "4", "--schemes", "--plot", str(picture), "--json"]
    result = CliRunner().invoke(group, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)["schemes"]
    assert [(row["gpus"], row["scheme"]) for row in rows] == [(4, scheme) for scheme in schemes.SCHEMES]
    assert rows[0]["block_mib"] < rows[1]["block_mib"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    paper = CliRunner().invoke(group, ["simulate", "--inputs", "paper", "--schemes"])
    assert isinstance(paper.exception, ConfigError)


def test_the_simulator_needs_no_torch():
    code = "import sys, megafold.trainer.parallel.simulator; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_groups_that_do_not_divide_the_gpus_are_left_out_or_refused():
    asked = ["simulate", "--tokens", "512", "--sp", "3", "--gpus", "8"]
    refused = CliRunner().invoke(group, asked)
    assert refused.exit_code == 2
    assert "--sp 3 divides none of --gpus 8" in refused.output
    result = CliRunner().invoke(group, [*asked, "--gpus", "6", "--json"])
    assert [row["gpus"] for row in json.loads(result.output)["steps"]] == [6]


def test_samples_that_fit_on_no_number_of_gpus_are_told():
    result = CliRunner().invoke(group, [*ARGUMENTS, "--tokens", "1000000", "--gpus", "2"])
    assert result.output.splitlines()[-1].endswith("does not fit")
