"""Several caches as one data set."""

import json
import pickle
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megafold.pipeline.errors import InputError
from megafold.pipeline.stream import (
    CropConfig,
    MixedStream,
    MsaConfig,
    Source,
    Stream,
    StreamConfig,
    open_stream,
)
from megafold.pipeline.stream.mixture import merged_settings
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain


def config(**changes):
    return StreamConfig(crop=CropConfig(tokens=6, atoms=60), **changes)


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    found = []
    for letter in "xyz":
        path = tmp_path_factory.mktemp("mixed") / letter
        chains = [Chain(["ALA", "GLY", "LYS"] * 4)]
        names = [f"{number}{letter}{letter}{letter}" for number in range(3)]
        fake.publish(path, [(fake.structure(name, chains), chains, "") for name in names])
        found.append(path)
    return found


def mixed(caches, shares=(0.6, 0.3, 0.1), **changes):
    sources = [
        Source(name=cache.name, stream=Stream(cache, config()), probability=share)
        for cache, share in zip(caches, shares, strict=True)
    ]
    return MixedStream(sources, **changes)


def test_sources_come_with_their_probabilities(caches):
    stream = mixed(caches, seed=1, epoch_size=4000)
    assert len(stream) == 4000
    counts = Counter(stream.source(index).name for index in range(4000))
    for name, share in (("x", 0.6), ("y", 0.3), ("z", 0.1)):
        assert abs(counts[name] / 4000 - share) < 5 * np.sqrt(share * (1 - share) / 4000)


def test_a_sample_is_the_one_that_its_source_alone_would_give(caches):
    stream = mixed(caches, (0.4, 0.3, 0.3), seed=8)
    assert len(stream) == 9
    streams = {cache.name: Stream(cache, config()) for cache in caches}
    copy = pickle.loads(pickle.dumps(stream))
    seen = set()
    for index in range(20):
        sample = stream.sample(index, epoch=2, attempt=index % 2)
        name = sample.meta["source"]
        alone = streams[name].sample(index, epoch=2, seed=8, attempt=index % 2)
        assert sample.meta == {**alone.meta, "source": name}
        assert (sample.features["coords"] == alone.features["coords"]).all()
        assert stream.entry_name(index, epoch=2, attempt=index % 2) == f"{name}/{alone.meta['entry']}"
        assert copy.sample(index, epoch=2, attempt=index % 2).meta == sample.meta
        assert stream.symmetry(index, epoch=2).chains == ()
        seen.add(name)
    assert len(seen) == 3
    assert [stream.source(i, seed=9).name for i in range(20)] != [stream.source(i).name for i in range(20)]


def test_the_identity_names_every_manifest_and_setting(caches):
    identity = mixed(caches, seed=8).identity()
    assert set(identity["manifest"]) == {"x", "y", "z"}
    assert len(set(identity["manifest"].values())) == 3
    assert identity["stream"]["sources"]["y"]["probability"] == 0.3
    assert identity != mixed(caches, (0.5, 0.4, 0.1), seed=8).identity()


def test_mixtures_that_cannot_be_are_refused(caches):
    with pytest.raises(InputError, match="sum to 1"):
        mixed(caches, (0.6, 0.3, 0.3))
    with pytest.raises(InputError, match="different names"):
        mixed([caches[0], caches[0], caches[1]])
    with pytest.raises(InputError, match="different names"):
        MixedStream([])
    one, two = (
        Source(name=str(n), stream=Stream(caches[0], config(msa=MsaConfig(recycles=n))), probability=0.5)
        for n in (1, 2)
    )
    with pytest.raises(InputError, match=r"msa\.recycles differ"):
        MixedStream([one, two])


def test_settings_are_merged():
    base = {"seed": 1, "crop": {"tokens": 5, "atoms": 60}, "sampling": {"entries": ["a"]}}
    changes = {"crop": {"tokens": 6}, "sampling": {"entries": ["b"], "where": "has_msa"}}
    assert merged_settings(base, changes) == {
        "seed": 1,
        "crop": {"tokens": 6, "atoms": 60},
        "sampling": {"entries": ["b"], "where": "has_msa"},
    }
    assert base["crop"] == {"tokens": 5, "atoms": 60}


def test_settings_of_the_guide_can_be_read(caches):
    guide = Path(__file__).resolve().parents[2] / "docs" / "stream.md"
    (text,) = re.findall(r"```json\n(.*?)```", guide.read_text(), re.DOTALL)
    settings = json.loads(text)
    settings["mix"]["distilled"]["cache"] = caches[1]
    # No entry here has an alignment.
    settings["sampling"]["where"] = f"NOT ({settings['sampling']['where']})"
    stream = open_stream(caches[0], settings)
    assert isinstance(stream, MixedStream)
    assert [source.name for source in stream.sources] == ["main", "distilled"]
    assert [config.sampling.weights for config in stream.configs] == ["af3", "uniform"]


def test_a_file_of_settings_makes_a_stream_or_a_mixture(caches):
    settings = {"seed": 5, "crop": {"tokens": 6, "atoms": 60}, "sampling": {"where": "n_token > 3"}}
    assert isinstance(open_stream(caches[0], settings), Stream)
    more = {"cache": str(caches[1]), "probability": 0.25, "crop": {"tokens": 4}}
    stream = open_stream(caches[0], {**settings, "mix": {"more": more}})
    assert isinstance(stream, MixedStream)
    assert [(source.name, source.probability) for source in stream.sources] == [
        ("main", 0.75),
        ("more", 0.25),
    ]
    assert [config.crop.tokens for config in stream.configs] == [6, 4]
    assert {config.sampling.where for config in stream.configs} == {"n_token > 3"}
    assert stream.seed == 5
    with pytest.raises(InputError, match=r'"n_tokens" not found'):
        open_stream(caches[0], {"mix": {"more": {**more, "sampling": {"where": "n_tokens > 3"}}}})
    for wrong in ({"cache": "x"}, 5, {**more, "cache": 5}, {**more, "probability": "half"}):
        with pytest.raises(InputError, match=r"mix\.more needs a cache .* and a probability"):
            open_stream(caches[0], {"mix": {"more": wrong}})
    with pytest.raises(InputError, match=r"mix is \['more'\]: it has to be an object"):
        open_stream(caches[0], {"mix": ["more"]})
    with pytest.raises(InputError, match="the probabilities of main, more are"):
        open_stream(caches[0], {"mix": {"more": {**more, "probability": float("nan")}}})
    with pytest.raises(InputError, match="unknown mixx in stream"):
        open_stream(caches[0], {"mixx": {}})
