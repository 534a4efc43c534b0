"""The registry: dispatch, fallback and what it reports."""

import pytest
import torch

from megafold.trainer import ops
from megafold.trainer.errors import ConfigError
from megafold.trainer.ops import registry
from megafold.trainer.ops.registry import Operator


@pytest.fixture
def double(monkeypatch):
    """An operator of its own that only this test's registry knows."""
    monkeypatch.setattr(registry, "_operators", {})
    monkeypatch.setattr(registry, "_implementations", {})
    monkeypatch.setattr(registry, "_fallbacks", registry.Counter())
    monkeypatch.setattr(registry, "_PROVIDERS", {"eager": None, "compile": None, "triton": None})

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    return registry.operator(double)


def test_eager_is_the_default_and_use_backend_ends(double: Operator):
    registry.register("double", "triton")(lambda x: x - 100)
    x = torch.ones(2)
    assert torch.equal(double(x), 2 * x)
    with ops.use_backend("triton"):
        assert ops.active_backend() == "triton"
        assert torch.equal(double(x), x - 100)
        with ops.use_backend("eager"):
            assert torch.equal(double(x), 2 * x)
        assert ops.active_backend() == "triton"
    assert ops.active_backend() == "eager"


def test_operator_without_implementation_falls_back_and_says_so(double: Operator):
    with ops.use_backend("triton"):
        assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
        assert ops.backend_report() == {"double": "eager (no triton implementation)"}
    assert ops.backend_report() == {"double": "eager"}


def test_unsupported_arguments_fall_back_with_their_reason(double: Operator):
    def supports(x: torch.Tensor) -> str | None:
        return None if x.dtype == torch.float32 else f"dtype {x.dtype}"

    registry.register("double", "triton", supports=supports)(lambda x: x - 100)
    with ops.use_backend("triton"):
        assert double(torch.ones(1)).item() == -99
        assert double(torch.ones(1, dtype=torch.float64)).item() == 2
        assert ops.backend_report() == {"double": "triton; eager 1 times: dtype torch.float64"}


def test_wrong_names_are_refused(double: Operator):
    with pytest.raises(ConfigError, match="no operator 'triple'"):
        registry.register("triple", "triton")
    with pytest.raises(ConfigError, match="cannot register"):
        registry.register("double", "eager")
    registry.register("double", "compile")(lambda x: x)
    with pytest.raises(ConfigError, match="already"):
        registry.register("double", "compile")
    with pytest.raises(ConfigError, match="no back end 'cuda'"), ops.use_backend("cuda"):
        pass


def test_provider_that_cannot_be_imported_says_what_to_install(monkeypatch):
    monkeypatch.setattr(registry, "_PROVIDERS", {"eager": None, "triton": "megafold.no_such_module"})
    with pytest.raises(ImportError, match=r"megafold\[train\]"), ops.use_backend("triton"):
        pass


def test_operators_keep_their_reference_and_documentation():
    assert set(registry.operators()) == {
        "adaln",
        "dropout_add",
        "evoattention",
        "gated_output",
        "layernorm",
        "layernorm_linear",
        "single_attention",
        "smooth_lddt",
        "swiglu",
        "transition",
        "triangle_attention",
        "triangle_multiplication",
    }
    assert ops.evoattention.__doc__ is not None
    assert "softmax" in ops.evoattention.__doc__
